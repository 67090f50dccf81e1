// Full volumes: of pools and records, and of the log.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/vfs.h>

#include <chrono>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "disk_volume.h"
#include "environment_fixture.h"
#include "tests/kvstore/small_volume.h"
#include "tests/skip.h"

namespace pqcached::testing {
namespace {

using kvstore::testing::SmallVolume;
using kvstore::testing::Volume;

constexpr uint64_t kVolumeBytes = uint64_t{192} << 20;  // for four caches of 32 MiB
constexpr size_t kMostSequences = 20000;  // more than the pages that are there have records for

class VolumeFaultsTest : public EnvironmentTest {
 protected:
  // Waits until the sidecar has allocated all pages of its pools, which it does in the background.
  static void AwaitAllocated(const Volume& volume) {
    const auto left = [&] {
      struct statfs system = {};
      statfs(volume.path().c_str(), &system);
      return system.f_bfree;
    };
    auto before = left();
    for (int same = 0; same < 5;) {
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
      same = left() == before ? same + 1 : 0;
      before = left();
    }
  }
  // Another program fills the volume while the pool of the third engine grows.
  void FillWhilePoolsGrow(Volume& volume) {
    Start({"--pool-directory", volume.PathForOthers()});
    AddEngine(PQC_PATH_ONLY_LOCAL);
    AddEngine(PQC_PATH_ONLY_REMOTE);
    AwaitAllocated(volume);
    std::thread other([&] { volume.FillUp(0); });
    TryEngine();
    other.join();
    Act(100);
    EXPECT_EQ(TryEngine(), nullptr) << "the volume has room for another pool";
    EXPECT_TRUE(AwaitLog("event=short_of_memory call="));
    Act(20);
    Verify();
  }
  // A cache of sequences that consist of records alone fills what is left of its table.
  void FillRecords(Volume& volume) {
    Start({"--pool-directory", volume.PathForOthers(), "--max-sequences",
           std::to_string(kMostSequences)});
    AddEngine(PQC_PATH_ONLY_LOCAL);
    AddEngine(PQC_PATH_ONLY_REMOTE);
    {
      Client client = daemon().OpenClient();
      Cache cache = Must(client.OpenCache(SpecOf("many", {0})));
      volume.FillUp(0);
      // Sequences of which only records are stored.
      std::vector<Sequence> sequences;
      Status status;
      while (status.ok() && sequences.size() < kMostSequences) {
        Result<Sequence> made = cache.CreateSequence();
        status = made.status();
        if (made.ok()) sequences.push_back(std::move(*made));
      }
      EXPECT_EQ(status.code(), PQC_RESOURCE_EXHAUSTED) << status.ToString();
      EXPECT_TRUE(AwaitLog("event=short_of_memory call=CreateSequence "));
      EXPECT_NE(Log().find("no room for the record of another sequence"), std::string::npos);
      Act(100);
      Client another = daemon().OpenClient();  // the control memory is not on the volume
      Verify();
      ASSERT_TRUE(volume.FreeUp());
      EXPECT_TRUE(cache.CreateSequence().ok());
    }
    ExpectServes();
  }
  // The volume is still full when the next worker starts.
  void KillWorker() {
    const pid_t killed = worker();
    kill(killed, SIGKILL);
    ASSERT_GT(AwaitWorker(supervisor(), killed), 0);
    Verify();
    Act(50);
    Verify();
  }
};

TEST_F(VolumeFaultsTest, FullTmpfsPools) {
  SmallVolume volume(kVolumeBytes);
  if (!volume.valid()) PQC_SKIP("root") << "the kernel does not let this user mount";
  FillWhilePoolsGrow(volume);
  ASSERT_TRUE(volume.FreeUp());
  ExpectServes();
  Survived(Fault::kTmpfsPools);
}

TEST_F(VolumeFaultsTest, FullTmpfsRecords) {
  SmallVolume volume(kVolumeBytes);
  if (!volume.valid()) PQC_SKIP("root") << "the kernel does not let this user mount";
  FillRecords(volume);
  Survived(Fault::kTmpfsRecords);
}

TEST_F(VolumeFaultsTest, FullDiskRecords) {
  DiskVolume volume(kVolumeBytes);
  if (!volume.valid()) PQC_SKIP("loop_device") << "no ext4 image can be mounted";
  FillRecords(volume);
}

// 64 sessions share a step of the memory of their records.
TEST_F(VolumeFaultsTest, FullTmpfsSessions) {
  SmallVolume volume(kVolumeBytes);
  if (!volume.valid()) PQC_SKIP("root") << "the kernel does not let this user mount";
  Start({"--pool-directory", volume.PathForOthers()});
  AddEngine();
  volume.FillUp(0);
  std::vector<Client> clients;
  Status status;
  while (status.ok() && clients.size() < 100) {
    Result<Client> client =
        Client::Open({.endpoint = daemon().endpoint(), .path = PQC_PATH_ONLY_REMOTE});
    status = client.status();
    if (client.ok()) clients.push_back(std::move(*client));
  }
  EXPECT_EQ(status.code(), PQC_RESOURCE_EXHAUSTED) << status.ToString();
  EXPECT_TRUE(AwaitLog("event=short_of_memory call=Session "));
  clients.clear();
  ASSERT_TRUE(volume.FreeUp());
  ExpectServes();
}

TEST_F(VolumeFaultsTest, FullDiskPools) {
  DiskVolume volume(kVolumeBytes);
  if (!volume.valid()) PQC_SKIP("loop_device") << "no ext4 image can be mounted";
  FillWhilePoolsGrow(volume);
  KillWorker();
  ASSERT_TRUE(volume.FreeUp());
  ExpectServes();
  Survived(Fault::kDiskPools);
}

TEST_F(VolumeFaultsTest, FullDiskLog) {
  DiskVolume volume(uint64_t{4} << 20);
  if (!volume.valid()) PQC_SKIP("loop_device") << "no ext4 image can be mounted";
  const std::string log = volume.PathForOthers() + "/log";
  Start({"--log-file", log, "--log-level", "debug"});
  AddEngine(PQC_PATH_ONLY_LOCAL);
  AddEngine(PQC_PATH_ONLY_REMOTE);
  volume.FillUp(0);
  const std::string before = LogOf(log);
  // Each session is a line at its begin and at its end.
  for (int i = 0; i < 50 || LogOf(log).size() > before.size() + 4096; ++i) {
    ASSERT_LT(i, 1000) << "the volume was never full";
    daemon().OpenClient();
  }
  Act(50);
  ASSERT_TRUE(volume.FreeUp());
  ExpectServes();
  EXPECT_EQ(refusals(), 0u);
  const std::string text = LogOf(log);
  const size_t named = text.find("level=warning event=log_lines_lost lines=");
  ASSERT_NE(named, std::string::npos) << text;
  // Whole lines follow the loss.
  EXPECT_EQ(text.compare(text.rfind('\n', named) + 1, 3, "ts="), 0);
  EXPECT_NE(text.find("event=session_opened ", named), std::string::npos);
  Survived(Fault::kDiskLog, text);
}

}  // namespace
}  // namespace pqcached::testing

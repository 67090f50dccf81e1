// The whole daemon on a volume that is too small for what its caches were promised: engines of eight
// caches fill it, and workers are killed meanwhile. Calls are refused, and nothing that was
// acknowledged is lost.
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <memory>
#include <string>
#include <vector>

#include "faults.h"
#include "tests/kvstore/small_volume.h"
#include "tests/skip.h"

namespace pqcached::testing {
namespace {

constexpr uint32_t kCaches = 8;  // of 32 MiB each
constexpr size_t kVolumeBytes = size_t{160} << 20;

TEST(FullVolumeTest, RefusesCallsAndLosesNothing) {
  kvstore::testing::SmallVolume volume(kVolumeBytes);
  if (!volume.valid()) PQC_SKIP("root") << "the kernel does not let this user mount";
  // The daemon opens the volume through this process, because it has no place in the tree.
  const std::string directory =
      "/proc/" + std::to_string(getpid()) + volume.path().substr(std::string("/proc/self").size());
  Daemon daemon(
      {"--pool-directory", directory, "--max-pool-bytes", "1gib", "--max-failed-recoveries", "1"});
  std::vector<std::unique_ptr<Engine>> engines;
  Engine::Counts counts;
  for (uint32_t i = 0; i < kCaches; ++i) {
    auto engine = std::make_unique<Engine>(
        Engine::Options{.endpoint = daemon.endpoint(),
                        .path = i % 2 == 0 ? PQC_PATH_ONLY_LOCAL : PQC_PATH_ONLY_REMOTE,
                        .seed = i + 1,
                        .cache_name = "cache " + std::to_string(i)});
    if (engine->has_cache()) {
      engine->Act();
      engines.push_back(std::move(engine));
    } else {
      counts += engine->counts();
    }
  }
  ASSERT_GE(engines.size(), 2u);
  ASSERT_LT(engines.size(), kCaches) << "the volume has room for all pools";
  volume.FillUp(0);

  Client admin = daemon.OpenClient();
  pid_t worker = 0;
  const int rounds = FaultCount(4, 40);
  for (int round = 0; round < rounds; ++round) {
    for (int i = 0; i < 150; ++i) engines[static_cast<size_t>(i) % engines.size()]->Act();
    worker = AwaitWorker(daemon.process().pid(), worker);
    ASSERT_GT(worker, 0);
    ASSERT_EQ(kill(worker, SIGKILL), 0);
    for (const auto& engine : engines) engine->Verify();
  }
  for (const auto& engine : engines) counts += engine->counts();
  EXPECT_TRUE(counts.clean()) << counts.ToString();
  EXPECT_GT(counts.refusals, 0u) << "the volume was never full";
  RecordProperty("acknowledged_bytes_lost_full_volume",
                 std::to_string(counts.acknowledged_bytes_lost));
  engines.clear();
  Record("full_volumes_survived", 1, counts, AwaitNothingLeft(admin, 1));
}

}  // namespace
}  // namespace pqcached::testing

// Memory that others take: of a control group, and huge pages. And every allocation of a call, each
// of which fails once.
#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "allocation_shim.h"
#include "control_group.h"
#include "environment_fixture.h"
#include "preload.h"
#include "tests/kvstore/huge_volume.h"
#include "tests/kvstore/small_volume.h"
#include "tests/sanitizers.h"
#include "tests/skip.h"

namespace pqcached::testing {
namespace {

using kvstore::testing::HugeVolume;
using kvstore::testing::SmallVolume;

constexpr uint64_t kMiB = uint64_t{1} << 20;
// A control group with less than 64 MiB gives its memory to no pool.
constexpr uint64_t kLeftBytes = 40 * kMiB;

class MemoryFaultsTest : public EnvironmentTest {
 protected:
  // Makes the control group that ends after the daemon. Returns whether it limits memory.
  bool MakeGroup(int version) {
    group_ = std::make_unique<ControlGroup>(version, 512 * kMiB);
    return group_->valid();
  }
  // Starts the daemon in the group, so that it knows the limit from the start.
  void StartInGroup() {
    ASSERT_TRUE(group_->Add(getpid()));
    Start();
    ASSERT_TRUE(group_->Leave());
  }
  void FillControlGroup(Fault fault) {
    StartInGroup();
    AddEngine(PQC_PATH_ONLY_LOCAL);
    AddEngine(PQC_PATH_ONLY_REMOTE);
    const pid_t before = worker();
    {
      const Hog hog(*group_, group_->left_bytes() - kLeftBytes);
      ASSERT_TRUE(hog.took());
      EXPECT_EQ(TryEngine(), nullptr) << "another pool has found memory";
      EXPECT_TRUE(AwaitLog("event=short_of_memory call="));
      Act(50);
      Verify();
    }
    ExpectServes();
    // The kernel ends a hog that takes what the sidecar has left free.
    const Hog hog(*group_, group_->left_bytes() + 100 * kMiB);
    EXPECT_FALSE(hog.took());
    Act(50);
    EXPECT_EQ(worker(), before) << "the kernel has killed the worker";
    Survived(fault);
  }

 private:
  std::unique_ptr<ControlGroup> group_;
};

TEST_F(MemoryFaultsTest, ControlGroupOfVersion1) {
  if (!MakeGroup(1)) {
    PQC_SKIP("memory_cgroup") << "needs root and a writable memory controller of version 1";
  }
  FillControlGroup(Fault::kControlGroup1);
}

TEST_F(MemoryFaultsTest, ControlGroupOfVersion2) {
  if (!MakeGroup(2)) {
    PQC_SKIP("memory_cgroup_v2") << "the memory controller is not one of version 2 here";
  }
  FillControlGroup(Fault::kControlGroup2);
}

TEST_F(MemoryFaultsTest, HugePagesExhausted) {
  HugeVolume volume(96);
  if (!volume.complete()) PQC_SKIP("hugetlbfs") << "this user gets no huge pages";
  Start({"--pool-directory", volume.PathForOthers()});
  AddEngine(PQC_PATH_ONLY_LOCAL);
  volume.FillUp(0);
  EXPECT_EQ(TryEngine(), nullptr) << "another pool has found huge pages";
  EXPECT_TRUE(AwaitLog("event=short_of_memory call=OpenCache "));
  Act(100);
  Verify();
  ASSERT_TRUE(volume.FreeUp());
  ExpectServes();
  Survived(Fault::kHugePages);
}

// The n-th allocation fails, for every n of what an engine does with a new cache.
class AllocationFaultsTest : public EnvironmentTest {
 protected:
  static constexpr int kMost = 500;
  // With a sanitizer, which makes each daemon several times slower, only some of them fail.
#ifdef __SANITIZE_ADDRESS__
  static constexpr int kStride = 8;
#else
  static constexpr int kStride = 1;
#endif

  // Starts a daemon whose allocations fail as `fails` says once the first engine has its memory.
  // Returns whether all were granted before the second engine was done.
  bool SurvivesFrom(int n, ShimmedAllocations::Fails fails) {
    TempFolder folder;
    SmallVolume volume(192 * kMiB);
    const SharedFile<ShimmedAllocations> allocations(folder.File("allocations"));
    {
      const ScopedVariable shim("LD_PRELOAD", PreloadOf(PQCACHED_ALLOCATION_SHIM));
      const ScopedVariable file(kAllocationShimVariable, allocations.path());
      std::vector<std::string> flags = {"--log-file", folder.File("log")};
      if (volume.valid()) flags.insert(flags.end(), {"--pool-directory", volume.PathForOthers()});
      Start(flags);
    }
    AddEngine();
    allocations->left = n;
    allocations->fails = fails;
    if (TryEngine() != nullptr) Act(40);
    Verify();
    const bool all_granted = allocations->failed == 0;
    allocations->fails = ShimmedAllocations::kNone;
    if (refusals() > 0) {
      ++refused_;
      const std::string log = LogOf(folder.File("log"));
      EXPECT_NE(log.find("event=short_of_memory "), std::string::npos) << log;
    }
    ExpectServes();
    counts_ += EndEngines();
    Stop();
    return all_granted;
  }
  void Sweep(ShimmedAllocations::Fails fails, uint64_t least_refused) {
    bool all_granted = false;
    for (int n = 0; !all_granted && n < kMost && !HasFailure(); n += kStride) {
      SCOPED_TRACE(n);
      all_granted = SurvivesFrom(n, fails);
    }
    EXPECT_TRUE(all_granted) << "more than " << kMost << " allocations";
    EXPECT_GE(refused_, least_refused / kStride);
    EXPECT_TRUE(counts_.clean()) << counts_.ToString();
    Record("allocations_refused", refused_, counts_, {});
  }

 private:
  Engine::Counts counts_;
  uint64_t refused_ = 0;
};

TEST_F(AllocationFaultsTest, AllFromTheNth) { Sweep(ShimmedAllocations::kAllLater, 20); }

TEST_F(AllocationFaultsTest, TheNthAlone) { Sweep(ShimmedAllocations::kOne, 3); }

}  // namespace
}  // namespace pqcached::testing

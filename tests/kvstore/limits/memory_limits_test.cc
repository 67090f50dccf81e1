// Limits of memory, in trees that look like /proc and /sys.
#include "kvstore/limits/memory_limits.h"

#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/skip.h"

namespace pqcached::kvstore {
namespace {

namespace fs = std::filesystem;
using ::testing::ElementsAre;
using ::testing::EndsWith;
using ::testing::IsEmpty;
using ::testing::Pair;

// A directory that plays the root of a machine.
class MemoryLimitsTest : public ::testing::Test {
 protected:
  MemoryLimitsTest() {
    std::string pattern = (fs::temp_directory_path() / "memory_limits_XXXXXX").string();
    root_ = mkdtemp(pattern.data());
  }
  ~MemoryLimitsTest() override { fs::remove_all(root_); }

  void Write(const std::string& path, const std::string& text) {
    const fs::path file = root_ / path;
    fs::create_directories(file.parent_path());
    std::ofstream(file) << text;
  }
  void WriteMachine(size_t available_kilobytes) {
    Write("proc/meminfo", "MemTotal:       99999999 kB\nMemFree:  1 kB\nMemAvailable:   " +
                              std::to_string(available_kilobytes) + " kB\n");
  }
  MemoryLimits Read() { return ReadMemoryLimits(root_.string()); }

  fs::path root_;
};

TEST_F(MemoryLimitsTest, NothingKnownLimitsNothing) {
  const MemoryLimits limits = Read();
  EXPECT_EQ(limits.available_bytes, kUnlimitedBytes);
  EXPECT_EQ(limits.excess_bytes, 0u);
  EXPECT_EQ(limits.source, "");
  EXPECT_THAT(limits.hugetlb_available_bytes, IsEmpty());
}

TEST_F(MemoryLimitsTest, TheMachineLimitsWhatNoGroupDoes) {
  WriteMachine(1000);
  Write("proc/self/cgroup", "0::/a\n");
  Write("sys/fs/cgroup/cgroup.controllers", "memory\n");
  Write("sys/fs/cgroup/a/memory.max", "max\n");
  Write("sys/fs/cgroup/a/memory.high", "max\n");
  Write("sys/fs/cgroup/a/memory.current", "500000\n");
  const MemoryLimits limits = Read();
  EXPECT_EQ(limits.available_bytes, 1024000u);
  EXPECT_THAT(limits.source, EndsWith("/proc/meminfo"));
}

TEST_F(MemoryLimitsTest, TheTightestOfTheGroupAndItsAncestorsDecides) {
  WriteMachine(1 << 20);
  Write("proc/self/cgroup", "0::/pod/container\n");
  Write("sys/fs/cgroup/cgroup.controllers", "memory\n");
  Write("sys/fs/cgroup/pod/container/memory.max", "10000000\n");
  Write("sys/fs/cgroup/pod/container/memory.current", "1000000\n");
  Write("sys/fs/cgroup/pod/memory.max", "4000000\n");
  Write("sys/fs/cgroup/pod/memory.current", "3000000\n");
  MemoryLimits limits = Read();
  EXPECT_EQ(limits.available_bytes, 1000000u);
  EXPECT_THAT(limits.source, EndsWith("/pod/memory.max"));
  EXPECT_EQ(limits.excess_bytes, 0u);

  Write("sys/fs/cgroup/pod/container/memory.high", "1500000\n");
  limits = Read();
  EXPECT_EQ(limits.available_bytes, 500000u);
  EXPECT_THAT(limits.source, EndsWith("/pod/container/memory.high"));

  Write("sys/fs/cgroup/pod/container/memory.high", "900000\n");
  limits = Read();
  EXPECT_EQ(limits.available_bytes, 0u);
  EXPECT_EQ(limits.excess_bytes, 100000u);
}

TEST_F(MemoryLimitsTest, UnusedFilePagesCountAsFree) {
  Write("proc/self/cgroup", "0::/\n");
  Write("sys/fs/cgroup/cgroup.controllers", "memory\n");
  Write("sys/fs/cgroup/memory.max", "5000000\n");
  Write("sys/fs/cgroup/memory.current", "4900000\n");
  Write("sys/fs/cgroup/memory.stat", "anon 100\nfile 4000000\ninactive_file 1000000\n");
  EXPECT_EQ(Read().available_bytes, 1100000u);
}

TEST_F(MemoryLimitsTest, Version1CountsToo) {
  Write("proc/self/cgroup", "12:cpu,cpuacct:/x\n4:memory:/docker/abc\n1:name=systemd:/\n0::/\n");
  Write("sys/fs/cgroup/memory/docker/abc/memory.limit_in_bytes", "8000000\n");
  Write("sys/fs/cgroup/memory/docker/abc/memory.usage_in_bytes", "9000000\n");
  Write("sys/fs/cgroup/memory/docker/abc/memory.stat",
        "inactive_file 5\ntotal_inactive_file 500000\n");
  Write("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
  Write("sys/fs/cgroup/memory/memory.usage_in_bytes", "99000000\n");
  const MemoryLimits limits = Read();
  EXPECT_EQ(limits.available_bytes, 0u);
  EXPECT_EQ(limits.excess_bytes, 500000u);
}

// Docker without a namespace of control groups: the path is the host's, the mount the container's.
TEST_F(MemoryLimitsTest, APathThatTheMountDoesNotShowMeansItsRoot) {
  Write("proc/self/cgroup", "4:memory:/docker/abc\n");
  Write("sys/fs/cgroup/memory/memory.limit_in_bytes", "7000000\n");
  Write("sys/fs/cgroup/memory/memory.usage_in_bytes", "1000000\n");
  EXPECT_EQ(Read().available_bytes, 6000000u);
}

TEST_F(MemoryLimitsTest, NeverLeavesTheMount) {
  Write("proc/self/cgroup", "0::/../../../outside\n");
  Write("sys/fs/cgroup/cgroup.controllers", "memory\n");
  Write("outside/memory.max", "1\n");
  Write("outside/memory.current", "0\n");
  EXPECT_EQ(Read().available_bytes, kUnlimitedBytes);
}

TEST_F(MemoryLimitsTest, HugePagesAreLimitedApart) {
  Write("proc/self/cgroup", "5:hugetlb:/a\n0::/b\n");
  Write("sys/fs/cgroup/cgroup.controllers", "memory hugetlb\n");
  Write("sys/fs/cgroup/hugetlb/a/hugetlb.2MB.limit_in_bytes", "8388608\n");
  Write("sys/fs/cgroup/hugetlb/a/hugetlb.2MB.usage_in_bytes", "2097152\n");
  Write("sys/fs/cgroup/b/hugetlb.1GB.max", "2147483648\n");
  Write("sys/fs/cgroup/b/hugetlb.1GB.current", "1073741824\n");
  Write("sys/fs/cgroup/b/hugetlb.1GB.rsvd.max", "1\n");
  Write("sys/fs/cgroup/b/hugetlb.2MB.max", "max\n");
  const MemoryLimits limits = Read();
  EXPECT_EQ(limits.available_bytes, kUnlimitedBytes);
  EXPECT_THAT(limits.hugetlb_available_bytes,
              ElementsAre(Pair("1GB", 1073741824u), Pair("2MB", 6291456u)));
  EXPECT_EQ(limits.HugetlbAvailableBytes(size_t{1} << 30), 1073741824u);
  EXPECT_EQ(limits.HugetlbAvailableBytes(size_t{2} << 20), 6291456u);
  EXPECT_EQ(limits.HugetlbAvailableBytes(size_t{64} << 10), kUnlimitedBytes);
}

TEST_F(MemoryLimitsTest, FilesThatMakeNoSenseLimitNothing) {
  Write("proc/meminfo", "MemAvailable: lots kB\n");
  Write("proc/self/cgroup", "nonsense\n:::\n0:\n4:memory:/\n");
  Write("sys/fs/cgroup/memory/memory.limit_in_bytes", "-1\n");
  Write("sys/fs/cgroup/memory/memory.usage_in_bytes", "\n");
  EXPECT_EQ(Read().available_bytes, kUnlimitedBytes);
}

// The limit of this process, lowered where the machine lets us: it needs version 1 and root.
TEST(RealMemoryLimitsTest, AVersion1GroupOfThisMachineIsHonoured) {
  const fs::path group =
      fs::path("/sys/fs/cgroup/memory") / ("pqcached-test-" + std::to_string(getpid()));
  std::error_code error;
  if (geteuid() != 0 || !fs::create_directory(group, error)) {
    PQC_SKIP("memory_cgroup") << "needs root and a writable memory controller of version 1";
  }
  const pid_t child = fork();
  if (child == 0) {
    std::ofstream(group / "cgroup.procs") << getpid();
    std::ofstream(group / "memory.limit_in_bytes") << (size_t{512} << 20);
    const size_t available = AvailableMemoryBytes();
    _exit(available > 0 && available <= (size_t{512} << 20) ? 0 : 1);
  }
  int status = 0;
  waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
  EXPECT_TRUE(fs::remove(group, error)) << error.message();
}

}  // namespace
}  // namespace pqcached::kvstore

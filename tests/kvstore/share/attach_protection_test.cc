// What a client can do to a pool, as another user and as root, with the descriptor that it was given
// and with those of the sidecar: nothing but read. Each attack is also made on a plain memfd, where it
// must work, so that a refusal means something.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>

#include "kvstore/memory/pool.h"
#include "kvstore/share/control_memory.h"
#include "tests/kvstore/share/attach_child.h"
#include "tests/skip.h"

namespace pqcached::kvstore {
namespace {

constexpr size_t kBytes = 2 * kMinExtentBytes;
constexpr char kNotPermitted[] = "setuid is not permitted";

// Attacks with a descriptor that may write; the names of those that worked.
std::string AttackWritable(int fd) {
  std::string worked;
  void* data = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (data != MAP_FAILED) worked += " mmap";
  if (pwrite(fd, "x", 1, 0) == 1) worked += " write";
  if (fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, 4096) == 0) worked += " punch";
  if (ftruncate(fd, 4096) == 0 || ftruncate(fd, 2 * kBytes) == 0) worked += " truncate";
  if (fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK) == 0) worked += " seal";
  return worked;
}

// Attacks with a descriptor that was received, which can only read.
std::string AttackReceived(int fd) {
  std::string worked;
  const std::string path = "/proc/self/fd/" + std::to_string(fd);
  if (open(path.c_str(), O_RDWR) >= 0) worked += " reopen";
  if (open(path.c_str(), O_RDONLY | O_TRUNC) >= 0) worked += " truncating reopen";
  if (mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0) != MAP_FAILED) {
    worked += " mmap";
  }
  void* data = mmap(nullptr, kBytes, PROT_READ, MAP_SHARED, fd, 0);
  if (data == MAP_FAILED) return "cannot even read";
  if (mprotect(data, kBytes, PROT_READ | PROT_WRITE) == 0) worked += " mprotect";
  if (madvise(data, kBytes, MADV_REMOVE) == 0) worked += " remove";
  if (pwrite(fd, "x", 1, 0) == 1) worked += " write";
  if (fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, 4096) == 0) worked += " punch";
  if (ftruncate(fd, 4096) == 0) worked += " truncate";
  if (fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK) == 0) worked += " seal";
  if (fchmod(fd, 0777) == 0) worked += " chmod";
  return worked;
}

class AttachProtectionTest : public testing::TestWithParam<bool> {
 protected:
  void SetUp() override {
    if (getuid() != 0) PQC_SKIP("root") << "needs root, to become another user";
    auto pool = Pool::Create({.capacity_bytes = kBytes, .strict = GetParam()});
    ASSERT_TRUE(pool.ok()) << pool.status();
    pool_ = *std::move(pool);
    const size_t sizes[] = {kBytes};
    auto extents = pool_->Allocate(sizes);
    ASSERT_TRUE(extents.ok());
    extent_ = std::move(extents->front());
    std::memset(extent_.data(), 0x5a, kBytes);
    auto shared = pool_->Share();
    ASSERT_TRUE(shared.ok()) << shared.status();
    shared_ = *std::move(shared);
  }

  void ExpectUnchanged() {
    for (size_t i = 0; i < kBytes; ++i) ASSERT_EQ(extent_.data()[i], std::byte{0x5a}) << i;
  }

  std::string AsNobody(const std::function<std::string()>& attack) {
    return InChild([&] { return BecomeNobody() ? attack() : std::string(kNotPermitted); });
  }

  std::shared_ptr<Pool> pool_;
  Extent extent_;
  SharedMemory shared_;
};

TEST_P(AttachProtectionTest, AnotherUserCanOnlyReadThroughWhatItReceived) {
  EXPECT_EQ(shared_.size_bytes, kBytes);
  const std::string worked = AsNobody([&] { return AttackReceived(shared_.descriptor.get()); });
  if (worked == kNotPermitted) PQC_SKIP("root") << kNotPermitted;
  EXPECT_EQ(worked, "");
  ExpectUnchanged();
}

TEST_P(AttachProtectionTest, ThePlainMemfdOfTheSameKindFallsToTheSameAttacks) {
  const FileDescriptor plain(memfd_create("plain", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  ASSERT_EQ(ftruncate(plain.get(), kBytes), 0);
  const auto received = OpenReadOnly(plain.get());
  ASSERT_TRUE(received.ok());
  const std::string worked = AsNobody([&] { return AttackReceived(received->get()); });
  if (worked == kNotPermitted) PQC_SKIP("root") << kNotPermitted;
  EXPECT_NE(worked.find("reopen"), std::string::npos) << worked;
  EXPECT_EQ(InChild([&] { return AttackWritable(plain.get()); }),
            " mmap write punch truncate seal");
}

TEST_P(AttachProtectionTest, AnotherUserCannotOpenTheSidecarsDescriptors) {
  const pid_t sidecar = getpid();
  const std::string worked = AsNobody([&] {
    std::string opened;
    for (const int fd : {pool_->descriptor(), shared_.descriptor.get()}) {
      const std::string path = "/proc/" + std::to_string(sidecar) + "/fd/" + std::to_string(fd);
      if (open(path.c_str(), O_RDWR) >= 0) opened += " read-write";
      if (open(path.c_str(), O_RDONLY) >= 0) opened += " read-only";
    }
    return opened;
  });
  if (worked == kNotPermitted) PQC_SKIP("root") << kNotPermitted;
  EXPECT_EQ(worked, "");
}

TEST_P(AttachProtectionTest, NotEvenRootResizesAPoolAndInStrictModeNobodyWritesIt) {
  const std::string path = "/proc/self/fd/" + std::to_string(shared_.descriptor.get());
  const std::string worked = InChild([&] {
    const int again = open(path.c_str(), O_RDWR);
    if (again < 0) return std::string(" (no reopen)");
    if (GetParam()) return AttackWritable(again) + AttackWritable(pool_->descriptor());
    return std::string(
        ftruncate(again, 4096) == 0 || ftruncate(again, 2 * kBytes) == 0 ? " truncate" : "");
  });
  EXPECT_TRUE(worked.empty() || worked == " (no reopen)") << worked;
  ExpectUnchanged();
  std::memset(extent_.data(), 0x5b, kBytes);  // the sidecar itself goes on
  EXPECT_EQ(extent_.data()[kBytes - 1], std::byte{0x5b});
}

INSTANTIATE_TEST_SUITE_P(Pools, AttachProtectionTest, testing::Bool(),
                         [](const auto& each) { return each.param ? "Strict" : "Plain"; });

TEST(ControlMemoryProtection, NotEvenRootWritesTheWords) {
  const auto control = ControlMemory::Create(4, 7);
  ASSERT_TRUE(control.ok()) << control.status();
  const auto shared = (*control)->Share();
  ASSERT_TRUE(shared.ok()) << shared.status();
  const std::string path = "/proc/self/fd/" + std::to_string(shared->descriptor.get());
  const std::string worked = InChild([&] {
    const int again = open(path.c_str(), O_RDWR);
    return again < 0 ? std::string() : AttackWritable(again);
  });
  EXPECT_EQ(worked, "");
  (*control)->words(3).token_count.store(9);
  void* data =
      mmap(nullptr, shared->size_bytes, PROT_READ, MAP_SHARED, shared->descriptor.get(), 0);
  ASSERT_NE(data, MAP_FAILED);
  const auto* page = static_cast<const ControlPage*>(data);
  EXPECT_EQ(page->boot_word.load(), 7u);
  const auto* words = reinterpret_cast<const LeaseWords*>(static_cast<const std::byte*>(data) +
                                                          page->words_offset_bytes);
  EXPECT_EQ(words[3].token_count.load(), 9u);
  munmap(data, shared->size_bytes);
}

}  // namespace
}  // namespace pqcached::kvstore

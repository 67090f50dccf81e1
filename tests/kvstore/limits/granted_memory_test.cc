#include "kvstore/limits/granted_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <thread>
#include <vector>

#include "kvstore/memory/memfd.h"
#include "tests/kvstore/fixture.h"
#include "tests/kvstore/small_volume.h"
#include "tests/skip.h"

namespace pqcached::kvstore {
namespace {

using testing::SmallVolume;

constexpr size_t kChunk = 64 << 10;
constexpr size_t kSize = 10 * kChunk + 4096;  // the last chunk is short

struct Memory {
  explicit Memory(FileDescriptor of) : descriptor(std::move(of)) {
    auto mapped = Mapping::Map(descriptor, kSize, Mapping::Access::kReadWrite);
    if (mapped.ok()) mapping = *std::move(mapped);
  }
  std::span<std::byte> bytes() const { return {mapping.data(), kSize}; }

  FileDescriptor descriptor;
  Mapping mapping;
};

TEST(GrantedMemory, AllocatesTheChunksOfARangeOnce) {
  const Memory memory(*CreateMemfd("granted", kSize));
  GrantedMemory granted(memory.descriptor.get(), memory.bytes(), kChunk, nullptr);
  EXPECT_EQ(granted.absent_bytes(), kSize);
  ASSERT_TRUE(granted.Ensure(0, 0).ok());
  EXPECT_EQ(granted.present_bytes(), 0u);
  ASSERT_TRUE(granted.Ensure(kChunk - 1, 2).ok());
  EXPECT_EQ(granted.present_bytes(), 2 * kChunk);
  EXPECT_EQ(granted.absent_bytes(), kSize - 2 * kChunk);
  memory.bytes()[kChunk] = std::byte{7};
  ASSERT_TRUE(granted.Ensure(0, kSize).ok());
  EXPECT_EQ(granted.present_bytes(), kSize);
  EXPECT_EQ(granted.absent_bytes(), 0u);
  EXPECT_EQ(memory.bytes()[kChunk], std::byte{7});
}

TEST(GrantedMemory, AllocatesAgainWhatWasRemoved) {
  const Memory memory(*CreateMemfd("granted", kSize));
  GrantedMemory granted(memory.descriptor.get(), memory.bytes(), kChunk, nullptr);
  ASSERT_TRUE(granted.Ensure(0, kSize).ok());
  granted.Remove(kChunk + 4096, 4096,
                 [&] { ASSERT_EQ(madvise(&memory.bytes()[kChunk + 4096], 4096, MADV_REMOVE), 0); });
  EXPECT_EQ(granted.absent_bytes(), 4096u);
  EXPECT_EQ(granted.present_bytes(), kSize - kChunk);
  ASSERT_TRUE(granted.Ensure(kChunk, 1).ok());
  EXPECT_EQ(granted.absent_bytes(), 0u);
}

TEST(GrantedMemory, IsAllocatedOnceByManyThreads) {
  const Memory memory(*CreateMemfd("granted", kSize));
  const auto ledger = std::make_shared<MemoryLedger>();
  auto promise = ledger->Promise("a", MemoryUse::kPool, kSize, "");
  ASSERT_TRUE(promise.ok()) << promise.status();
  GrantedMemory granted(memory.descriptor.get(), memory.bytes(), kChunk, *promise);
  std::vector<std::thread> threads;
  for (size_t t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (size_t at = t; at < kSize; at += 4096) {
        ASSERT_TRUE(granted.Ensure(at, 1).ok());
        reinterpret_cast<std::atomic<uint8_t>*>(memory.bytes().data())[at] = 1;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(granted.absent_bytes(), 0u);
  EXPECT_EQ(ledger->Accounts()[0].allocated_bytes, kSize);
}

TEST(GrantedMemory, OfAFullFileSystemIsRefusedWithoutASignal) {
  SmallVolume volume(size_t{1} << 20);
  if (!volume.valid()) PQC_SKIP("root") << "this process may not mount";
  const Memory memory(FileDescriptor(
      open((volume.path() + "/memory").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600)));
  ASSERT_EQ(ftruncate(memory.descriptor.get(), kSize), 0);
  volume.FillUp(3 * kChunk);
  const auto ledger = std::make_shared<MemoryLedger>();
  auto promise = ledger->Promise("a", MemoryUse::kPool, kSize, "");
  ASSERT_TRUE(promise.ok()) << promise.status();
  GrantedMemory granted(memory.descriptor.get(), memory.bytes(), kChunk, *promise);
  ASSERT_TRUE(granted.Ensure(0, 2 * kChunk).ok());
  const absl::Status refused = granted.Ensure(0, 8 * kChunk);
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted) << refused;
  EXPECT_EQ(granted.present_bytes(), 2 * kChunk);
  ASSERT_TRUE(volume.FreeUp());
  EXPECT_TRUE(granted.Ensure(0, 8 * kChunk).ok());
}

}  // namespace
}  // namespace pqcached::kvstore

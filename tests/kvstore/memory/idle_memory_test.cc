// Free memory of a pool returns to the machine, and its idle reserve stays present; resident bytes
// are those that the kernel counts.
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <thread>

#include "gtest/gtest.h"
#include "kvstore/memory/pool.h"

namespace pqcached::kvstore {
namespace {

constexpr size_t kMiB = size_t{1} << 20;
constexpr size_t kCapacityBytes = 64 * kMiB;
constexpr size_t kReserveBytes = 8 * kMiB;

std::shared_ptr<Pool> MakePool(size_t idle_reserve_bytes, bool strict = false) {
  auto pool = Pool::Create({.capacity_bytes = kCapacityBytes,
                            .idle_reserve_bytes = idle_reserve_bytes,
                            .strict = strict});
  EXPECT_TRUE(pool.ok()) << pool.status();
  return *std::move(pool);
}

size_t ResidentBytes(const Pool& pool) {
  struct stat status = {};
  EXPECT_EQ(fstat(pool.descriptor(), &status), 0);
  return static_cast<size_t>(status.st_blocks) * 512;
}

std::vector<Extent> Allocate(Pool& pool, std::vector<size_t> sizes_bytes) {
  auto extents = pool.Allocate(sizes_bytes);
  EXPECT_TRUE(extents.ok()) << extents.status();
  return extents.ok() ? *std::move(extents) : std::vector<Extent>();
}

// Writes and reads one word of each page.
void Fill(const Extent& extent, uint64_t word) {
  for (size_t i = 0; i < extent.size_bytes(); i += 4096) {
    std::memcpy(extent.data() + i, &word, sizeof(word));
  }
}
bool Holds(const Extent& extent, uint64_t word) {
  for (size_t i = 0; i < extent.size_bytes(); i += 4096) {
    if (std::memcmp(extent.data() + i, &word, sizeof(word)) != 0) return false;
  }
  return true;
}

// Waits until the pages of the pool are at least these bytes, at most 20 s. Returns whether they are.
bool AwaitResident(const Pool& pool, size_t bytes) {
  const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  while (ResidentBytes(pool) < bytes && std::chrono::steady_clock::now() < until) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return ResidentBytes(pool) >= bytes;
}

size_t AllowedBytes(const Pool& pool) {
  const size_t used_bytes = pool.usage().used_bytes;
  return used_bytes + used_bytes / 5 + kReserveBytes;
}

TEST(IdleMemory, ReturnsWhenItWasUnusedForTwoIntervals) {
  const auto pool = MakePool(kReserveBytes);
  pool->PauseTouching(true);  // nothing is added while the bytes are compared
  const auto kept = Allocate(*pool, {4 * kMiB});
  Fill(kept.front(), 1);
  Allocate(*pool, {16 * kMiB, 8 * kMiB, 4 * kMiB});
  const size_t before = ResidentBytes(*pool);
  ASSERT_GE(before, 32 * kMiB);
  EXPECT_EQ(pool->ReturnUnusedPages(), 0u);
  EXPECT_EQ(pool->ReturnUnusedPages(), 0u);
  EXPECT_EQ(ResidentBytes(*pool), before);
  const size_t returned_bytes = pool->ReturnUnusedPages();
  EXPECT_EQ(ResidentBytes(*pool), before - returned_bytes);
  EXPECT_LE(ResidentBytes(*pool), AllowedBytes(*pool));
  EXPECT_GT(ResidentBytes(*pool), AllowedBytes(*pool) - 2 * kMiB);  // no more than it must
  EXPECT_EQ(pool->ReturnUnusedPages(), 0u);
  EXPECT_TRUE(Holds(kept.front(), 1));
}

TEST(IdleMemory, TheReserveIsPresentForTheNextAllocations) {
  for (const size_t kept_bytes : {size_t{0}, 4 * kMiB}) {
    SCOPED_TRACE(kept_bytes);
    const auto pool = MakePool(kReserveBytes);
    pool->TouchReserve();
    EXPECT_EQ(ResidentBytes(*pool), kReserveBytes);
    pool->PauseTouching(true);
    const auto kept = kept_bytes == 0 ? std::vector<Extent>() : Allocate(*pool, {kept_bytes});
    Allocate(*pool, {32 * kMiB});
    pool->PauseTouching(false);
    pool->TouchReserve();
    pool->PauseTouching(true);
    for (int call = 0; call < 3; ++call) pool->ReturnUnusedPages();
    const size_t before = ResidentBytes(*pool);
    ASSERT_LE(before, AllowedBytes(*pool));
    const auto next = Allocate(*pool, {4 * kMiB, 2 * kMiB, kMiB});
    EXPECT_EQ(ResidentBytes(*pool), before);
  }
}

TEST(IdleMemory, AThreadKeepsTheReservePresentAheadOfAllocations) {
  const auto pool = MakePool(kReserveBytes);
  pool->TouchReserve();
  const auto used = Allocate(*pool, {4 * kMiB, 4 * kMiB, 4 * kMiB});
  EXPECT_TRUE(AwaitResident(*pool, 12 * kMiB + kReserveBytes));
  EXPECT_EQ(ResidentBytes(*pool), 12 * kMiB + kReserveBytes);
}

TEST(IdleMemory, TheReserveIsNotTouchedWhilePaused) {
  const auto pool = MakePool(kReserveBytes);
  pool->PauseTouching(true);
  const size_t before = ResidentBytes(*pool);
  pool->TouchReserve();
  EXPECT_EQ(ResidentBytes(*pool), before);
  pool->PauseTouching(false);
  EXPECT_TRUE(AwaitResident(*pool, kReserveBytes));
}

TEST(IdleMemory, TheReserveEndsAtTheLimitOfUse) {
  const auto pool = MakePool(kReserveBytes);
  pool->SetUseLimit(4 * kMiB, "");
  pool->TouchReserve();
  EXPECT_EQ(ResidentBytes(*pool), 4 * kMiB);
}

TEST(IdleMemory, TheReserveIsRestoredWhenTheLimitOfUseEnds) {
  const auto pool = MakePool(kReserveBytes);
  pool->SetUseLimit(4 * kMiB, "");
  pool->TouchReserve();
  pool->SetUseLimit(kCapacityBytes, "");
  EXPECT_TRUE(AwaitResident(*pool, kReserveBytes));
}

TEST(IdleMemory, TheReserveIsRestoredWhenFreeMemoryWasErased) {
  const auto pool = MakePool(kReserveBytes);
  pool->TouchReserve();
  pool->PauseTouching(true);
  pool->EraseFree();
  EXPECT_EQ(ResidentBytes(*pool), 0u);
  pool->PauseTouching(false);
  EXPECT_TRUE(AwaitResident(*pool, kReserveBytes));
  pool->EraseFree();
  EXPECT_TRUE(AwaitResident(*pool, kReserveBytes));
}

TEST(IdleMemory, WithoutAReserveOnlyExtentsHavePages) {
  const auto pool = MakePool(0);
  pool->TouchReserve();
  EXPECT_EQ(ResidentBytes(*pool), 0u);
  const auto used = Allocate(*pool, {4 * kMiB});
  EXPECT_EQ(ResidentBytes(*pool), 4 * kMiB);
}

TEST(IdleMemory, PoolsThatShareAReserveKeepItTogether) {
  const auto reserve = std::make_shared<IdleReserve>(kReserveBytes);
  std::vector<std::shared_ptr<Pool>> pools;
  const auto resident_bytes = [&] {
    size_t bytes = 0;
    for (const auto& pool : pools) bytes += ResidentBytes(*pool);
    return bytes;
  };
  const auto end_interval = [&] {
    for (const auto& pool : pools) pool->ReturnUnusedPages();
  };
  for (int i = 0; i < 4; ++i) {
    auto pool = Pool::Create({.capacity_bytes = kCapacityBytes, .idle_reserve = reserve});
    ASSERT_TRUE(pool.ok()) << pool.status();
    pools.push_back(*std::move(pool));
    pools.back()->PauseTouching(true);  // this thread touches
  }
  const auto touch = [](Pool& pool) {
    pool.PauseTouching(false);
    pool.TouchReserve();
    pool.PauseTouching(true);
  };
  for (const auto& pool : pools) touch(*pool);
  EXPECT_EQ(resident_bytes(), kReserveBytes);  // equal parts
  EXPECT_EQ(ResidentBytes(*pools[2]), kReserveBytes / 4);

  // Two pools are used, the others are not.
  for (int call = 0; call < 3; ++call) {
    for (const size_t used : {0u, 2u}) Allocate(*pools[used], {16 * kMiB});
    end_interval();
  }
  for (const size_t used : {0u, 2u}) touch(*pools[used]);
  EXPECT_EQ(ResidentBytes(*pools[1]) + ResidentBytes(*pools[3]), 0u);
  for (int call = 0; call < 3; ++call) end_interval();
  // All of them are idle: the one that was used last has the reserve.
  EXPECT_EQ(resident_bytes(), kReserveBytes);
  EXPECT_EQ(ResidentBytes(*pools[2]), kReserveBytes);

  // The reserve passes to another pool with its use, and when its pool has ended.
  auto kept = Allocate(*pools[3], {4 * kMiB});
  for (int call = 0; call < 3; ++call) end_interval();
  EXPECT_EQ(ResidentBytes(*pools[2]), 0u);
  EXPECT_LE(resident_bytes(), AllowedBytes(*pools[3]));
  kept.clear();
  pools.pop_back();
  for (const auto& pool : pools) touch(*pool);
  EXPECT_EQ(ResidentBytes(*pools[2]), kReserveBytes);
  EXPECT_EQ(resident_bytes(), kReserveBytes);
}

// A workload whose pause may contain a whole interval keeps its pages.
TEST(IdleMemory, ASteadyWorkloadKeepsItsPages) {
  const auto pool = MakePool(kReserveBytes);
  for (int round = 0; round < 20; ++round) {
    if (round % 2 == 0) Allocate(*pool, {32 * kMiB});
    EXPECT_EQ(pool->ReturnUnusedPages(), 0u) << round;
  }
}

TEST(IdleMemory, StrictPoolsKeepTheirPages) {
  const auto pool = MakePool(kReserveBytes, /*strict=*/true);
  pool->PauseTouching(true);
  const auto kept = Allocate(*pool, {4 * kMiB});
  Fill(kept.front(), 1);
  Allocate(*pool, {32 * kMiB});
  const size_t before = ResidentBytes(*pool);
  for (int call = 0; call < 3; ++call) EXPECT_EQ(pool->ReturnUnusedPages(), 0u);
  EXPECT_EQ(pool->ReturnFreePages(kCapacityBytes), 0u);
  EXPECT_EQ(ResidentBytes(*pool), before);
  EXPECT_TRUE(Holds(kept.front(), 1));
}

TEST(IdleMemory, HeldPagesStayWhereTheyAre) {
  const auto pool = MakePool(kReserveBytes);
  pool->PauseTouching(true);
  const auto kept = Allocate(*pool, {4 * kMiB});
  Fill(kept.front(), 1);
  const size_t freed_at = [&] {
    const auto freed = Allocate(*pool, {32 * kMiB});
    Fill(freed.front(), 2);
    return freed.front().ref().offset_bytes();
  }();
  const size_t before = ResidentBytes(*pool);
  PageHold hold = pool->HoldPages();
  PageHold other = pool->HoldPages();
  for (int call = 0; call < 3; ++call) EXPECT_EQ(pool->ReturnUnusedPages(), 0u);
  EXPECT_EQ(pool->ReturnFreePages(kCapacityBytes), 0u);
  EXPECT_EQ(ResidentBytes(*pool), before);

  // A second mapping stands for the device's: it reads the same page before and after.
  const auto shared = pool->Share();
  ASSERT_TRUE(shared.ok());
  pool->EraseFree();
  EXPECT_EQ(ResidentBytes(*pool), before);
  std::byte byte{9};
  ASSERT_EQ(pread(shared->descriptor.get(), &byte, 1, static_cast<off_t>(freed_at)), 1);
  EXPECT_EQ(byte, std::byte{0});
  EXPECT_TRUE(Holds(kept.front(), 1));

  hold.reset();
  EXPECT_EQ(pool->ReturnFreePages(kCapacityBytes), 0u) << "another hold is left";
  other.reset();
  EXPECT_GE(pool->ReturnFreePages(kCapacityBytes), 32 * kMiB);
  EXPECT_LT(ResidentBytes(*pool), before);
}

TEST(IdleMemory, AHoldMayOutliveItsPool) {
  auto pool = MakePool(kReserveBytes);
  const std::weak_ptr<Pool> seen = pool;
  const PageHold hold = pool->HoldPages();
  pool.reset();
  EXPECT_TRUE(seen.expired());
}

TEST(IdleMemory, ReturnedMemoryHasItsPagesWhenItIsAllocatedAgain) {
  const auto pool = MakePool(0);
  Allocate(*pool, {kCapacityBytes});
  ASSERT_EQ(ResidentBytes(*pool), kCapacityBytes);
  EXPECT_EQ(pool->ReturnFreePages(kCapacityBytes), kCapacityBytes);
  ASSERT_EQ(ResidentBytes(*pool), 0u);
  const auto all = Allocate(*pool, {kCapacityBytes});
  EXPECT_EQ(ResidentBytes(*pool), kCapacityBytes);
}

// Pages return all the time while a caller allocates, writes, and frees. Every second unit is free,
// so that each is a piece of its own, and the caller allocates pieces that are about to return.
TEST(IdleMemory, NoByteInUseIsLostAndNoAllocationRefused) {
  constexpr size_t kUnits = kCapacityBytes / kMinExtentBytes;
  const auto pool = MakePool(kReserveBytes);
  std::atomic<bool> stop = false;
  std::thread returns([&] {
    while (!stop) pool->ReturnFreePages(kCapacityBytes);
  });
  int lost = 0;
  for (uint64_t round = 1; round <= 10; ++round) {
    auto units = Allocate(*pool, std::vector<size_t>(kUnits, kMinExtentBytes));
    if (units.size() < kUnits) break;
    for (const Extent& unit : units) Fill(unit, round);
    std::vector<Extent> kept;
    for (size_t i = 0; i < kUnits; i += 2) kept.push_back(std::move(units[i]));
    units.clear();
    for (size_t i = 0; i < kUnits / 2; ++i) {
      auto unit = Allocate(*pool, {kMinExtentBytes});
      if (unit.empty()) break;
      Fill(unit.front(), round);
      kept.push_back(std::move(unit.front()));
    }
    for (const Extent& unit : kept) lost += Holds(unit, round) ? 0 : 1;
  }
  stop = true;
  returns.join();
  EXPECT_EQ(lost, 0);
}

// The pool's only extent of that length is free, so it is allocated whatever happens to its pages.
TEST(IdleMemory, TheWholePoolCanBeAllocatedWhileItsPagesReturn) {
  const auto pool = MakePool(0);
  std::atomic<bool> stop = false;
  std::thread returns([&] {
    while (!stop) pool->ReturnFreePages(kCapacityBytes);
  });
  for (int round = 0; round < 20; ++round) {
    const auto all = Allocate(*pool, {kCapacityBytes});
    EXPECT_EQ(ResidentBytes(*pool), kCapacityBytes);
    EXPECT_EQ(pool->usage().free_bytes, 0u);
  }
  stop = true;
  returns.join();
}

}  // namespace
}  // namespace pqcached::kvstore

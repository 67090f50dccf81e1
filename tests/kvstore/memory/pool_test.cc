#include "kvstore/memory/pool.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>
#include <map>
#include <random>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kvstore/memory/buddy.h"
#include "kvstore/memory/run_allocator.h"

namespace pqcached::kvstore {
namespace {

using ::testing::HasSubstr;

// The specification: a map of units, searched for the lowest aligned free run of the smallest block
// that has one.
class PlainBuddy {
 public:
  explicit PlainBuddy(uint32_t unit_count) : taken_(unit_count, false) {}

  bool CanAllocate(uint32_t order) const {
    const uint32_t size = uint32_t{1} << order;
    for (uint32_t unit = 0; unit + size <= taken_.size(); unit += size) {
      if (IsFree(unit, size)) return true;
    }
    return false;
  }
  bool IsFree(uint32_t unit, uint32_t size) const {
    for (uint32_t i = unit; i < unit + size; ++i) {
      if (taken_[i]) return false;
    }
    return true;
  }
  bool IsUsed(uint32_t unit, uint32_t size) const {
    for (uint32_t i = unit; i < unit + size; ++i) {
      if (!taken_[i]) return false;
    }
    return true;
  }
  void Set(uint32_t unit, uint32_t size, bool taken) {
    for (uint32_t i = unit; i < unit + size; ++i) taken_[i] = taken;
  }
  uint64_t used() const {
    return static_cast<uint64_t>(std::count(taken_.begin(), taken_.end(), true));
  }
  // The runs of free units: first unit -> length.
  std::map<uint32_t, uint32_t> Runs() const {
    std::map<uint32_t, uint32_t> runs;
    for (uint32_t unit = 0; unit < taken_.size(); ++unit) {
      uint32_t end = unit;
      while (end < taken_.size() && !taken_[end]) ++end;
      if (end > unit) runs[unit] = end - unit;
      unit = end;
    }
    return runs;
  }
  uint32_t longest_run() const {
    uint32_t longest = 0;
    for (const auto& [begin, length] : Runs()) longest = std::max(longest, length);
    return longest;
  }
  // Where RunAllocator puts `count` units.
  std::optional<uint32_t> BestFit(uint32_t count) const {
    uint32_t block = 1;
    while (block < count) block *= 2;
    std::optional<uint32_t> place;
    uint32_t best = ~0u;
    for (const auto& [begin, length] : Runs()) {
      if (length < count || length >= best || begin + block > taken_.size()) continue;
      best = length;
      const uint32_t window = std::min(length, std::max(count, 1024u));
      const auto last =
          std::min<uint32_t>(begin + window - count, static_cast<uint32_t>(taken_.size()) - block);
      place = count < 8 ? last : begin;
    }
    return place;
  }
  uint64_t largest_free() const {
    for (uint32_t order = 31; order-- > 0;) {
      if ((uint64_t{1} << order) <= taken_.size() && CanAllocate(order))
        return uint64_t{1} << order;
    }
    return 0;
  }

 private:
  std::vector<bool> taken_;
};

TEST(BuddyAllocator, AgreesWithAPlainMapOverRandomOperations) {
  for (const uint32_t unit_count : {1u, 2u, 7u, 64u, 100u, 255u}) {
    std::mt19937 random(unit_count);
    BuddyAllocator buddy(unit_count);
    PlainBuddy plain(unit_count);
    std::vector<std::pair<uint32_t, uint32_t>> held;  // unit, order
    for (int step = 0; step < 3000; ++step) {
      if (random() % 2 == 0) {
        const auto order = static_cast<uint32_t>(random() % 6);
        const auto unit = buddy.Allocate(order);
        ASSERT_EQ(unit.has_value(), plain.CanAllocate(order));
        if (unit.has_value()) {
          const uint32_t size = uint32_t{1} << order;
          ASSERT_EQ(*unit % size, 0u);
          ASSERT_LE(*unit + size, unit_count);
          ASSERT_TRUE(plain.IsFree(*unit, size));
          plain.Set(*unit, size, true);
          held.emplace_back(*unit, order);
        }
      } else if (!held.empty()) {
        const size_t victim = random() % held.size();
        const auto [unit, order] = held[victim];
        held.erase(held.begin() + static_cast<ptrdiff_t>(victim));
        buddy.Free(unit, order);
        plain.Set(unit, uint32_t{1} << order, false);
      }
      const uint32_t order = static_cast<uint32_t>(random() % 6), size = uint32_t{1} << order;
      const uint32_t unit = static_cast<uint32_t>(random() % unit_count) / size * size;
      ASSERT_EQ(buddy.IsFree(unit, order), unit + size <= unit_count && plain.IsFree(unit, size));
      ASSERT_EQ(buddy.used_units(), plain.used());
      ASSERT_EQ(buddy.free_units(), unit_count - plain.used());
      ASSERT_EQ(buddy.largest_free_units(), plain.largest_free());
    }
  }
}

// The specification: a map of units. The run that is taken is the shortest that is long enough, and of several the first.
TEST(RunAllocator, AgreesWithAPlainMapOverRandomOperations) {
  for (const uint32_t unit_count : {1u, 2u, 7u, 64u, 100u, 255u, 2500u}) {
    std::mt19937 random(unit_count);
    RunAllocator runs(unit_count);
    PlainBuddy plain(unit_count);
    std::vector<UnitRange> held;
    for (int step = 0; step < 3000; ++step) {
      const auto count = static_cast<uint32_t>(1 + random() % 24);
      if (random() % 2 == 0) {
        const auto unit = runs.Allocate(count);
        ASSERT_EQ(unit, plain.BestFit(count));
        if (unit.has_value()) {
          plain.Set(*unit, count, true);
          held.push_back({*unit, count});
        }
      } else if (random() % 4 == 0) {
        const UnitRange wanted{static_cast<uint32_t>(random() % unit_count),
                               static_cast<uint32_t>(random() % 8)};
        const bool is_free = wanted.count > 0 && wanted.begin + wanted.count <= unit_count &&
                             plain.IsFree(wanted.begin, wanted.count);
        ASSERT_EQ(runs.Claim(wanted), is_free);
        if (is_free) {
          plain.Set(wanted.begin, wanted.count, true);
          held.push_back(wanted);
        }
      } else if (!held.empty()) {
        std::swap(held[random() % held.size()], held.back());
        runs.Free(held.back());
        plain.Set(held.back().begin, held.back().count, false);
        held.pop_back();
      }
      const auto unit = static_cast<uint32_t>(random() % unit_count);
      ASSERT_EQ(runs.IsFree({unit, count}),
                unit + count <= unit_count && plain.IsFree(unit, count));
      const UnitRange some{unit, std::min(count, unit_count - unit)};
      ASSERT_EQ(runs.IsUsed(some), plain.IsUsed(some.begin, some.count));
      ASSERT_EQ(runs.used_units(), plain.used());
      ASSERT_EQ(runs.free_units(), unit_count - plain.used());
      ASSERT_EQ(runs.longest_run(), plain.longest_run());
      RunAllocator many = runs, single = runs;
      const uint64_t wanted = random() % 20;
      uint64_t granted = 0;
      while (granted < wanted && single.Allocate(count).has_value()) ++granted;
      ASSERT_EQ(many.AllocateMany(count, wanted), granted);
      ASSERT_EQ(many.runs(), single.runs());
    }
  }
}

std::shared_ptr<Pool> MakePool(size_t units, size_t idle_reserve_bytes = 0) {
  auto pool = Pool::Create(
      {.capacity_bytes = units * kMinExtentBytes, .idle_reserve_bytes = idle_reserve_bytes});
  EXPECT_TRUE(pool.ok()) << pool.status();
  return *std::move(pool);
}

TEST(Pool, RoundsUpToUnitsAndCountsThemExactly) {
  const auto pool = MakePool(32);
  {
    const size_t sizes[] = {1, kMinExtentBytes, kMinExtentBytes + 1, 9 * kMinExtentBytes};
    const auto extents = pool->Allocate(sizes);
    ASSERT_TRUE(extents.ok());
    EXPECT_EQ((*extents)[0].size_bytes(), kMinExtentBytes);
    EXPECT_EQ((*extents)[1].size_bytes(), kMinExtentBytes);
    EXPECT_EQ((*extents)[2].size_bytes(), 2 * kMinExtentBytes);
    EXPECT_EQ((*extents)[3].size_bytes(), 9 * kMinExtentBytes);
    EXPECT_EQ((*extents)[3].ref(), (ExtentRef{.unit = 0, .order = 4}));
    EXPECT_EQ((*extents)[2].ref(), (ExtentRef{.unit = 30, .order = 1}));
    EXPECT_EQ(pool->usage().used_bytes, 13 * kMinExtentBytes);
    EXPECT_EQ(pool->usage().free_bytes, 19 * kMinExtentBytes);
    EXPECT_EQ(pool->usage().largest_free_bytes, 19 * kMinExtentBytes);
  }
  EXPECT_EQ(pool->usage().used_bytes, 0u);
  EXPECT_EQ(pool->usage().largest_free_bytes, 32 * kMinExtentBytes);
}

TEST(Pool, FullSaysTheShortfallAndHandsOutNothing) {
  const auto pool = MakePool(8);
  const size_t first[] = {8 * kMinExtentBytes - 1};
  const size_t both[] = {2 * kMinExtentBytes, 16 * kMinExtentBytes};
  const auto refused = pool->Allocate(both);
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(refused.status().message(),
              HasSubstr(std::to_string(10 * kMinExtentBytes) + " bytes short"));
  EXPECT_EQ(pool->usage().used_bytes, 0u);
  const auto extents = pool->Allocate(first);
  ASSERT_TRUE(extents.ok());
  EXPECT_EQ(pool->usage().free_bytes, 0u);
  EXPECT_EQ(pool->usage().largest_free_bytes, 0u);
}

TEST(Pool, FragmentedSaysHowMuchLongerARunWouldHaveToBe) {
  const auto pool = MakePool(4);
  const size_t ones[] = {1, 1, 1, 1};
  auto extents = pool->Allocate(ones);
  ASSERT_TRUE(extents.ok());
  (*extents)[0] = Extent();
  (*extents)[2] = Extent();
  const size_t two[] = {2 * kMinExtentBytes};
  const auto refused = pool->Allocate(two);
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(refused.status().message(),
              HasSubstr(std::to_string(kMinExtentBytes) + " bytes short"));
  (*extents)[1] = Extent();
  EXPECT_TRUE(pool->Allocate(two).ok());
}

TEST(Pool, ExtentsKeepThePoolMappedWhenItsOwnerIsGone) {
  auto pool = MakePool(2);
  const size_t sizes[] = {kMinExtentBytes};
  auto extents = pool->Allocate(sizes);
  ASSERT_TRUE(extents.ok());
  pool.reset();
  std::memset(extents->front().data(), 7, kMinExtentBytes);
  EXPECT_EQ(extents->front().data()[kMinExtentBytes - 1], std::byte{7});
}

TEST(Pool, MemoryIsSealedAgainstResizingAndPrivateToItsOwner) {
  const auto pool = MakePool(2);
  const int seals = fcntl(pool->descriptor(), F_GET_SEALS);
  EXPECT_EQ(seals & (F_SEAL_SHRINK | F_SEAL_GROW), F_SEAL_SHRINK | F_SEAL_GROW);
  EXPECT_NE(ftruncate(pool->descriptor(), 0), 0);
  EXPECT_NE(ftruncate(pool->descriptor(), 1 << 20), 0);
  struct stat status = {};
  ASSERT_EQ(fstat(pool->descriptor(), &status), 0);
  EXPECT_EQ(status.st_mode & 0777, 0600u);
  EXPECT_EQ(fcntl(pool->descriptor(), F_GETFD) & FD_CLOEXEC, FD_CLOEXEC);
}

TEST(Pool, TouchingInTheBackgroundKeepsWhatIsWrittenMeanwhile) {
  const auto pool = MakePool(1024, /*idle_reserve_bytes=*/1024 * kMinExtentBytes);
  pool->PauseTouching(false);
  const size_t sizes[] = {512 * kMinExtentBytes};
  auto extents = pool->Allocate(sizes);
  ASSERT_TRUE(extents.ok());
  for (size_t i = 0; i < 512; ++i) {
    std::memset(extents->front().data() + i * kMinExtentBytes, static_cast<int>(i % 251), 4096);
  }
  while (pool->absent_bytes() > 0) std::this_thread::yield();
  for (size_t i = 0; i < 512; ++i) {
    ASSERT_EQ(extents->front().data()[i * kMinExtentBytes + 4095], static_cast<std::byte>(i % 251));
  }
}

TEST(Pool, RefusesCapacitiesOutOfRange) {
  EXPECT_EQ(Pool::Create({.capacity_bytes = 0}).status().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(Pool::Create({.capacity_bytes = ~size_t{0}}).status().code(),
            absl::StatusCode::kInvalidArgument);
  const auto rounded = Pool::Create({.capacity_bytes = 1});
  ASSERT_TRUE(rounded.ok());
  EXPECT_EQ((*rounded)->usage().capacity_bytes, kMinExtentBytes);
}

}  // namespace
}  // namespace pqcached::kvstore

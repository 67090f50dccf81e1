#include "kvstore/evict/evictor.h"

#include <array>
#include <atomic>
#include <thread>

#include "kvstore/evict/memory_pressure.h"
#include "tests/kvstore/store_parts.h"

namespace pqcached::kvstore {
namespace {

using testing::SmallOptions;
using testing::StoreParts;

StoreOptions Retaining() {
  StoreOptions options = SmallOptions();
  options.retain = true;
  options.evict_idle_after = absl::ZeroDuration();  // living sessions are never evicted
  return options;
}

// A retained sequence of 512 tokens, and a living one of 256 that shares nothing with it.
class EvictorTest : public ::testing::Test {
 protected:
  void SetUp() override {
    parts_.End(parts_.Make("one", 512));
    ASSERT_EQ(Retained(), 1u);
    living_ = parts_.lifecycle.Create(parts_.cache, {.session = "two"})->sequence_id;
    parts_.Ingest(living_, 0, 256);
  }

  size_t Retained() const {
    return parts_.sequences.RetainedOfCache(parts_.cache->cache_id).size();
  }
  size_t used_bytes() const { return parts_.cache->pool->usage().used_bytes; }

  StoreParts parts_{Retaining()};
  uint64_t living_ = 0;
};

TEST_F(EvictorTest, EvictsNothingForAnImpossibleDemand) {
  const std::array<size_t, 1> size = {parts_.cache->pool->usage().capacity_bytes * 2};
  EXPECT_FALSE(parts_.evictor.MakeRoom(*parts_.cache, size));
  EXPECT_EQ(Retained(), 1u);
  EXPECT_EQ(parts_.evictor.evicted_bytes(), 0u);
}

TEST_F(EvictorTest, EvictsRetainedTokensAndNoLivingOnes) {
  const size_t before = used_bytes();
  const size_t freed = parts_.evictor.FreeRetained(*parts_.cache, ~size_t{0});
  EXPECT_GT(freed, 0u);
  EXPECT_EQ(used_bytes(), before - freed);
  EXPECT_EQ(parts_.evictor.evicted_bytes(), freed);
  EXPECT_EQ(Retained(), 0u);
  EXPECT_TRUE(parts_.sequences.FindInAnyTenant(living_).ok());
  EXPECT_EQ(parts_.evictor.FreeRetained(*parts_.cache, ~size_t{0}), 0u);
}

TEST_F(EvictorTest, EvictsIdleSequencesOnlyWhenTheyMayBe) {
  EXPECT_EQ(parts_.evictor.Candidates(*parts_.cache, /*retained_only=*/false).size(), 1u);
  EXPECT_TRUE(parts_.evictor.Candidates(*parts_.cache, /*retained_only=*/true)[0].retained);
}

TEST_F(EvictorTest, LeavesPinnedSequences) {
  const auto retained = parts_.sequences.RetainedOfCache(parts_.cache->cache_id);
  ASSERT_TRUE(retained[0].sequence->PinUntil(BootNanos() + 1'000'000'000'000).ok());
  EXPECT_TRUE(parts_.evictor.Candidates(*parts_.cache, /*retained_only=*/true).empty());
  EXPECT_EQ(parts_.evictor.FreeRetained(*parts_.cache, ~size_t{0}), 0u);
  const absl::Status refused = parts_.evictor.Evict(retained[0]);
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition) << refused;
  EXPECT_EQ(FieldOf(refused), "sequence_id");
}

TEST_F(EvictorTest, AnEvictedSequenceIsRemembered) {
  ASSERT_TRUE(parts_.evictor.Evict(*parts_.sequences.FindInAnyTenant(living_)).ok());
  EXPECT_EQ(parts_.evictor.evicted_sequences(), 1u);
  const absl::Status gone = parts_.sequences.FindInAnyTenant(living_).status();
  EXPECT_EQ(gone.code(), absl::StatusCode::kNotFound);
  EXPECT_NE(gone.message().find("evicted"), std::string_view::npos) << gone;
}

TEST_F(EvictorTest, ShortMemoryFreesRetainedBytesAndStopsGrowth) {
  const size_t before = used_bytes();
  MemoryLimits limits;
  limits.available_bytes = 0;
  limits.excess_bytes = 1;
  ApplyMemoryLimits(limits, std::array{parts_.cache}, parts_.evictor);
  EXPECT_LE(used_bytes(), before);
  EXPECT_LT(parts_.cache->pool->usage().limit_bytes,
            parts_.cache->pool->usage().capacity_bytes + 1);
  ApplyMemoryLimits(MemoryLimits(), std::array{parts_.cache}, parts_.evictor);
  EXPECT_EQ(parts_.cache->pool->usage().limit_bytes, parts_.cache->pool->usage().capacity_bytes);
}

TEST_F(EvictorTest, RunsBesidesCallersThatCreateAndEnd) {
  std::atomic<bool> stop = false;
  std::thread evicting([&] {
    while (!stop) parts_.evictor.FreeRetained(*parts_.cache, ~size_t{0});
  });
  for (int i = 0; i < 30; ++i) parts_.End(parts_.Make("three", 256));
  stop = true;
  evicting.join();
  parts_.evictor.FreeRetained(*parts_.cache, ~size_t{0});
  EXPECT_EQ(Retained(), 0u);
  EXPECT_TRUE(parts_.sequences.FindInAnyTenant(living_).ok());
}

}  // namespace
}  // namespace pqcached::kvstore

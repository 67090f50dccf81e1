// The time of an engine's prefill: how it is measured, and how builds use it. Time is passed in.
#include "kvstore/sequence/prefill_times.h"

#include <algorithm>
#include <optional>

#include "gtest/gtest.h"
#include "tests/kvstore/fixture.h"

namespace pqcached::kvstore {
namespace {

using testing::kTenant;
using testing::SmallSpec;
using testing::TestSequence;

constexpr IndexDescriptor kIndex = {IndexKind::kPq, 2, 4};
constexpr uint32_t kLayers = 4;
constexpr PrefillCost kCost = {2e-9, 3e-6, 0};  // per layer

double SecondsOf(const PrefillCost& cost, double tokens) {
  return cost.seconds_per_token_squared * tokens * tokens + cost.seconds_per_token * tokens;
}

// The chunks of one prefill, whose times are those of `cost` in all layers.
void Prefill(PrefillTimes& times, uint64_t sequence_id, uint32_t chunk_count,
             const PrefillCost& cost = kCost, SteadyTime begin = {}) {
  for (uint32_t chunk = 0; chunk < chunk_count; ++chunk) {
    const uint32_t end = 512 * (chunk + 1);
    times.NoteChunk(sequence_id, 512 * chunk, end,
                    begin + absl::Seconds(kLayers * SecondsOf(cost, end)));
  }
}

void ExpectCost(const PrefillTimes& times, const PrefillCost& cost) {
  for (const uint32_t tokens : {1000u, 10000u, 30000u}) {
    EXPECT_NEAR(SecondsOf(times.Cost(), tokens), SecondsOf(cost, tokens),
                0.01 * SecondsOf(cost, tokens));
  }
}

TEST(PrefillTimes, AreWhatIsConfiguredOrReported) {
  PrefillTimes times({1, 2, 3}, kLayers);
  EXPECT_EQ(times.Cost().seconds_per_token, 2);
  times.Set({.measured = false, .cost = {4, 5, 6}});
  EXPECT_EQ(times.Cost().seconds_per_token, 5);
  Prefill(times, 1, 30);
  EXPECT_EQ(times.Cost().seconds_per_token, 5) << "not measured";
}

TEST(PrefillTimes, AreMeasuredFromTheArrivalOfChunks) {
  PrefillTimes times({1, 2, 3}, kLayers);
  times.Set({.measured = true});
  Prefill(times, 1, 8);
  EXPECT_EQ(SecondsOf(times.Cost(), 1000), 0) << "7 intervals are too few";
  Prefill(times, 2, 40);
  ExpectCost(times, kCost);
  // The newest intervals count most.
  constexpr PrefillCost kFaster = {1e-9, 1e-6, 0};
  for (uint64_t id = 3; id < 13; ++id) Prefill(times, id, 60, kFaster);
  ExpectCost(times, kFaster);
}

TEST(PrefillTimes, OfInterleavedPrefillsAreWhatTheyTakeTogether) {
  PrefillTimes times({}, kLayers);
  times.Set({.measured = true});
  SteadyTime now;
  for (uint32_t chunk = 0; chunk < 20; ++chunk) {
    for (const uint64_t id : {1u, 2u}) {
      now += absl::Milliseconds(5);
      times.NoteChunk(id, 100 * chunk, 100 * (chunk + 1), now);
    }
  }
  ExpectCost(times, {0, 0.010 / 100 / kLayers, 0});
}

TEST(PrefillTimes, LeavePausesAndDecodedTokensOut) {
  PrefillTimes times({}, kLayers);
  times.Set({.measured = true});
  SteadyTime now;
  uint32_t begin = 0;
  for (int turn = 0; turn < 10; ++turn) {
    for (int chunk = 0; chunk < 4; ++chunk) {
      now += absl::Milliseconds(4);
      times.NoteChunk(1, begin, begin + 100, now);
      begin += 100;
    }
    if (turn % 2 == 0) begin += 7;  // decoded
    now += turn % 2 == 0 ? absl::Seconds(20) : absl::Seconds(61);
  }
  ExpectCost(times, {0, 0.004 / 100 / kLayers, 0});
}

TEST(PrefillTimes, AreNeverNegative) {
  PrefillTimes times({}, kLayers);
  times.Set({.measured = true});
  // Ever faster chunks, and chunks that arrive at once.
  SteadyTime now;
  for (uint32_t chunk = 0; chunk < 20; ++chunk) {
    now += absl::Milliseconds(20 - chunk);
    times.NoteChunk(1, 100 * chunk, 100 * (chunk + 1), now);
  }
  EXPECT_GE(times.Cost().seconds_per_token_squared, 0);
  EXPECT_GT(times.Cost().seconds_per_token, 0);
  for (uint64_t id = 2; id < 40; ++id) {
    for (uint32_t chunk = 0; chunk < 20; ++chunk) {
      times.NoteChunk(id, 100 * chunk, 100 * (chunk + 1), now);
    }
  }
  EXPECT_GE(times.Cost().seconds_per_token_squared, 0);
  EXPECT_GE(times.Cost().seconds_per_token, 0);
}

// Returns the most iterations of a build that leaves their number to the cost.
uint32_t IterationsOf(const std::optional<PrefillReport>& report) {
  CacheSpec spec = SmallSpec();
  spec.prefill = report;
  TestSequence sequence(spec);
  sequence.Ingest(300);
  uint32_t most = 0;
  const absl::Status status = sequence.store().BuildIndex(
      kTenant, sequence.id(), {.index = kIndex, .iterations = 0}, [&](const BuildProgress& p) {
        most = std::max(most, p.iterations);
        return true;
      });
  EXPECT_TRUE(status.ok()) << status;
  return most;
}

TEST(PrefillTimes, GiveABuildItsIterations) {
  EXPECT_EQ(IterationsOf({}), 10u);
  EXPECT_EQ(IterationsOf(PrefillReport{.cost = {0, 1e-12, 0}}), 1u);
  EXPECT_EQ(IterationsOf(PrefillReport{.cost = {0, 1, 0}}), 10u);
  EXPECT_EQ(IterationsOf(PrefillReport{.measured = true}), 10u) << "not known yet";
}

TEST(PrefillTimes, OfAnOpenCacheAreReplaced) {
  CacheSpec spec = SmallSpec();
  spec.prefill = PrefillReport{.cost = {0, 0.5, 0}};
  TestSequence sequence(spec);
  Store& store = sequence.store();
  const auto known = [&] { return store.ListCaches(kTenant).front().prefill; };
  EXPECT_EQ(known().cost.seconds_per_token, 0.5);
  spec.prefill.reset();
  ASSERT_TRUE(store.OpenCache(kTenant, spec, "session").ok());
  EXPECT_EQ(known().cost.seconds_per_token, 0.5);
  spec.prefill = PrefillReport{.measured = true};
  ASSERT_TRUE(store.OpenCache(kTenant, spec, "session").ok());
  EXPECT_TRUE(known().measured);
  EXPECT_EQ(known().cost.seconds_per_token, 0);
  for (int chunk = 0; chunk < 20; ++chunk) sequence.Ingest(64);
  EXPECT_GT(known().cost.seconds_per_token + known().cost.seconds_per_token_squared, 0);
}

}  // namespace
}  // namespace pqcached::kvstore

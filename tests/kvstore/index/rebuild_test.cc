// BuildIndex of an index that exists: what readers see until the new one is done, and what it covers then.
#include <functional>
#include <limits>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kvstore/read/indexes/index_types.h"
#include "tests/kvstore/brute_force.h"
#include "tests/kvstore/fixture.h"
#include "tests/kvstore/index/live_parts.h"
#include "tests/kvstore/index/nearest.h"

namespace pqcached::kvstore::testing {
namespace {

using Progress = std::function<bool(const BuildProgress&)>;

absl::Status Rebuild(TestSequence& sequence, const Progress& progress = {}, double drift = 0) {
  return sequence.store().BuildIndex(
      kTenant, sequence.id(),
      {.index = kIndex, .iterations = 6, .seed = 3, .rebuild = true, .rebuild_drift = drift},
      progress);
}

std::vector<float> Decoded(TestSequence& sequence) {
  return DecodeKeys(sequence.store(), sequence.id(), sequence.layer(3), kIndex).data;
}

TEST(Rebuild, TrainsOnAllRowsAndCodesThemAnew) {
  TestSequence sequence;
  Add(sequence, 150, 0, 1, /*append=*/false);
  sequence.Build(kIndex, 6);
  Add(sequence, 50, 8, 1, /*append=*/true);  // far from all centroids
  const std::vector<float> before = Decoded(sequence);
  ASSERT_TRUE(Rebuild(sequence).ok());
  for (const uint32_t layer : {1u, 3u}) {
    const LayerModel& model = sequence.layer(layer);
    const DecodedKeys decoded = DecodeKeys(sequence.store(), sequence.id(), model, kIndex);
    ExpectNearest(model, kIndex, decoded, {0, 200}, {0, 200});
    EXPECT_GT(decoded.key(199, 0)[0], 4) << "the new keys have no centroid of their own";
  }
  EXPECT_NE(Decoded(sequence), before);
  ExpectSelects(sequence);
  const SequenceInfo info = Describe(sequence);
  EXPECT_EQ(info.indexes.size(), 1u);
  sequence.Append(40);
  ExpectNearest(sequence.layer(3), kIndex,
                DecodeKeys(sequence.store(), sequence.id(), sequence.layer(3), kIndex), {200, 240},
                {0, 200});
  sequence.ExpectRowsMatch();
}

TEST(Build, WorksForAllSubspacesAndBits) {
  for (const IndexDescriptor& index : {Pq(1, 1), Pq(16, 1), Pq(8, 2), Pq(2, 3), Pq(4, 1)}) {
    SCOPED_TRACE(NameOf(index));
    TestSequence sequence;
    sequence.Ingest(250);
    sequence.Build(index, 4);
    sequence.Append(70);
    for (const uint32_t layer : {1u, 3u}) {
      const LayerModel& model = sequence.layer(layer);
      ExpectNearest(model, index, DecodeKeys(sequence.store(), sequence.id(), model, index),
                    {0, 320}, {0, 250});
    }
    ExpectSelects(sequence, index);
  }
}

TEST(Rebuild, IsTheIndexThatAFirstBuildWouldMake) {
  TestSequence once, twice;
  for (TestSequence* sequence : {&once, &twice}) {
    sequence->random().seed(9);
    sequence->Ingest(700);
  }
  twice.Build(kIndex, 1);
  ASSERT_NE(Decoded(twice), std::vector<float>());
  ASSERT_TRUE(Rebuild(twice).ok());
  ASSERT_TRUE(Rebuild(once).ok());  // there is none yet: an ordinary build
  EXPECT_EQ(Decoded(once), Decoded(twice));
}

TEST(Rebuild, ReadersKeepTheEarlierIndexUntilTheEnd) {
  TestSequence sequence;
  sequence.Ingest(700);
  sequence.Build(kIndex, 1);
  const std::vector<float> before = Decoded(sequence);
  uint32_t reports = 0;
  ASSERT_TRUE(Rebuild(sequence, [&](const BuildProgress&) {
                ++reports;
                EXPECT_EQ(Decoded(sequence), before) << "after " << reports << " reports";
                return true;
              }).ok());
  EXPECT_GE(reports, 4u);
  EXPECT_NE(Decoded(sequence), before);
}

TEST(Rebuild, RowsThatComeMeanwhileAreInBothIndexes) {
  TestSequence sequence;
  sequence.Ingest(200);
  sequence.Build(kIndex, 1);
  uint32_t reports = 0;
  ASSERT_TRUE(Rebuild(sequence, [&](const BuildProgress&) {
                sequence.Append(reports++ == 0 ? 150 : 20);
                ExpectSelects(sequence);  // by the earlier codebooks
                return true;
              }).ok());
  ASSERT_GE(reports, 2u);
  sequence.Append(30);
  const LayerModel& model = sequence.layer(3);
  ExpectNearest(model, kIndex, DecodeKeys(sequence.store(), sequence.id(), model, kIndex),
                {0, model.tokens}, {0, 200});
  sequence.ExpectRowsMatch();
}

TEST(Rebuild, ACancelledOrFailedOneLeavesTheEarlierIndex) {
  TestSequence sequence;
  sequence.Ingest(500);
  sequence.Build(kIndex, 1);
  const std::vector<float> before = Decoded(sequence);
  const size_t used_bytes = sequence.store().ListCaches("").front().used_bytes;
  EXPECT_TRUE(absl::IsCancelled(Rebuild(sequence, [](const BuildProgress&) { return false; })));
  EXPECT_EQ(Decoded(sequence), before);
  EXPECT_EQ(sequence.store().ListCaches("").front().used_bytes, used_bytes);
  sequence.Append(40);
  sequence.ExpectRowsMatch();
  ASSERT_TRUE(Rebuild(sequence).ok());
}

TEST(Rebuild, OneAtATime) {
  TestSequence sequence;
  sequence.Ingest(300);
  sequence.Build(kIndex, 1);
  ASSERT_TRUE(Rebuild(sequence, [&](const BuildProgress&) {
                EXPECT_TRUE(absl::IsAborted(Rebuild(sequence)));
                return true;
              }).ok());
  EXPECT_TRUE(Rebuild(sequence).ok());
}

TEST(Rebuild, ByDriftOnlyWhenKeysHaveDrifted) {
  TestSequence sequence;
  Add(sequence, 300, 0, 1, /*append=*/false);
  sequence.Build(kIndex, 6);
  Add(sequence, 200, 0, 1, /*append=*/true);
  const std::vector<float> before = Decoded(sequence);
  const absl::Status still = Rebuild(sequence, {}, 3);
  EXPECT_TRUE(absl::IsAlreadyExists(still)) << still;
  EXPECT_EQ(Decoded(sequence), before);
  Add(sequence, 100, 8, 1, /*append=*/true);
  EXPECT_TRUE(Rebuild(sequence, {}, 3).ok());
  EXPECT_NE(Decoded(sequence), before);
  EXPECT_TRUE(absl::IsAlreadyExists(Rebuild(sequence, {}, 3)));
  const absl::Status plain =
      sequence.store().BuildIndex(kTenant, sequence.id(), {.index = kIndex}, {});
  EXPECT_TRUE(absl::IsAlreadyExists(plain)) << plain;
}

TEST(Rebuild, ALiveIndexGoesOnWithTheNewCodebooks) {
  TestSequence sequence(SmallSpec(), LiveOptions());
  sequence.NewSequence(Live());
  Add(sequence, 4 * kChunk, 0, 1, /*append=*/false);
  ASSERT_TRUE(Finish(sequence).ok());
  WaitIdle(sequence.store());
  const std::vector<float> before = Decoded(sequence);
  ASSERT_TRUE(Rebuild(sequence).ok());
  EXPECT_NE(Decoded(sequence), before);
  for (int i = 0; i < 3; ++i) Add(sequence, kTail, 0, 1, /*append=*/true);
  Add(sequence, 2 * kChunk, 0, 1, /*append=*/false);
  WaitIdle(sequence.store());
  const LayerModel& model = sequence.layer(3);
  ExpectNearest(model, kIndex, DecodeKeys(sequence.store(), sequence.id(), model, kIndex),
                {4 * kChunk, model.tokens}, {0, 4 * kChunk});
  Add(sequence, kChunk, 4, 1, /*append=*/false);  // drifts away: a new generation
  ASSERT_TRUE(Finish(sequence).ok());
  WaitIdle(sequence.store());
  ExpectCoded(sequence);
  ExpectSelects(sequence);
  sequence.ExpectRowsMatch();
}

TEST(Rebuild, OfAForkLeavesTheOtherSequenceAsItWas) {
  TestSequence sequence;
  sequence.Ingest(600);
  sequence.Build(kIndex, 1);
  const std::vector<float> before = Decoded(sequence);
  const auto fork = sequence.store().ForkSequence(kTenant, sequence.id(), 600, "fork");
  ASSERT_TRUE(fork.ok()) << fork.status();
  ASSERT_TRUE(Rebuild(sequence).ok());
  EXPECT_NE(Decoded(sequence), before);
  EXPECT_EQ(DecodeKeys(sequence.store(), fork->sequence_id, sequence.layer(3), kIndex).data,
            before);
}

TEST(Rebuild, RefusesARatioThatIsNone) {
  TestSequence sequence;
  sequence.Ingest(100);
  for (const double ratio : {-1.0, 1e7, std::numeric_limits<double>::quiet_NaN()}) {
    const absl::Status status = Rebuild(sequence, {}, ratio);
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << ratio;
    EXPECT_THAT(status.message(), ::testing::HasSubstr("rebuild.drift_ratio"));
  }
}

}  // namespace
}  // namespace pqcached::kvstore::testing

// BuildIndex of an index that exists: what readers see until the new one is done, and what it
// covers then.
#include <algorithm>
#include <atomic>
#include <functional>
#include <limits>
#include <vector>

#include "absl/time/clock.h"
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

// Writes rows of one layer, as engines do after each layer of a prefill.
void IngestLayer(TestSequence& sequence, uint32_t layer, uint32_t tokens) {
  LayerModel& model = sequence.layer(layer);
  const Floats keys = sequence.RandomKeys(model, tokens);
  const Floats values = sequence.RandomValues(model, tokens);
  auto ingest = sequence.store().BeginIngest(kTenant, sequence.id());
  ASSERT_TRUE(ingest.ok()) << ingest.status();
  ASSERT_TRUE(
      (*ingest)
          ->Write(model.tokens, {.layer = layer, .keys = keys.view(), .values = values.view()})
          .ok());
  ASSERT_TRUE((*ingest)->Commit().ok());
  model.Append(keys, values);
}

// One layer has rows, and its segments are closed, while the other one lags.
TEST(Rebuild, RowsOfALayerThatLagsAreCoded) {
  TestSequence sequence;
  sequence.Ingest(300);
  sequence.Build(kIndex, 1);
  std::atomic<uint32_t> asked = 0, reports = 0;  // training threads ask while a layer is reported
  const BuildSpec spec{.index = kIndex, .iterations = 2, .rebuild = true, .is_cancelled = [&] {
                         // After the last report only the rows that came meanwhile are coded.
                         if (reports == 2 && ++asked == 1) IngestLayer(sequence, 3, 600);
                         return false;
                       }};
  ASSERT_TRUE(sequence.store()
                  .BuildIndex(kTenant, sequence.id(), spec,
                              [&](const BuildProgress&) {
                                if (++reports == 2) IngestLayer(sequence, 1, 600);
                                return true;
                              })
                  .ok());
  ASSERT_GE(asked.load(), 1u);
  for (const uint32_t layer : {1u, 3u}) {
    const LayerModel& model = sequence.layer(layer);
    ASSERT_EQ(model.tokens, 900u);
    ExpectNearest(model, kIndex, DecodeKeys(sequence.store(), sequence.id(), model, kIndex),
                  {0, 900}, {0, 300});
  }
  ExpectSelects(sequence);
}

TEST(Rebuild, OfALiveIndexLetsNewSegmentsBeCodedMeanwhile) {
  StoreOptions options = LiveOptions();
  options.threads = 1;  // the report below waits, and may hold no thread that codes need
  TestSequence sequence(SmallSpec(), options);
  sequence.NewSequence(Live());
  Add(sequence, 4 * kChunk, 0, 1, /*append=*/false);
  ASSERT_TRUE(Finish(sequence).ok());
  WaitIdle(sequence.store());
  uint32_t reports = 0;
  ASSERT_TRUE(Rebuild(sequence, [&](const BuildProgress&) {
                if (reports++ > 0) return true;
                Add(sequence, 2 * kChunk, 0, 1, /*append=*/false);
                // The work on codes goes on; that on merges waits for the rebuild.
                const SteadyTime end = SteadyTime::Now() + absl::Minutes(1);
                while (SteadyTime::Now() < end) {
                  const SequenceInfo info = Describe(sequence);
                  bool ready = true;
                  for (const LayerInfo& layer : info.layers) {
                    ready &= layer.index_states.front() == LayerState::kReady;
                  }
                  if (ready) return true;
                  absl::SleepFor(absl::Milliseconds(1));
                }
                ADD_FAILURE() << "no codes";
                return true;
              }).ok());
  WaitIdle(sequence.store());
  ExpectCoded(sequence);
  ExpectSelects(sequence);
}

TEST(Rebuild, GivesCodebooksGenerationsThatNoEarlierOneHas) {
  TestSequence sequence;
  sequence.Ingest(700);
  sequence.Build(kIndex, 1);
  const auto newest = [&] {
    uint32_t generation = 0;
    for (const SegmentInfo& segment : Describe(sequence).segments) {
      generation = std::max(generation, segment.codebook_generations.front());
    }
    return generation;
  };
  const uint32_t before = newest();
  ASSERT_TRUE(Rebuild(sequence).ok());
  for (const SegmentInfo& segment : Describe(sequence).segments) {
    EXPECT_GT(segment.codebook_generations.front(), before);
  }
  sequence.Append(30);
  ExpectNearest(sequence.layer(3), kIndex,
                DecodeKeys(sequence.store(), sequence.id(), sequence.layer(3), kIndex), {700, 730},
                {256, 700});
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
  Add(sequence, 20, 8, 1, /*append=*/true);  // too few to be measured
  EXPECT_TRUE(absl::IsAlreadyExists(Rebuild(sequence, {}, 3)));
  Add(sequence, 200, 8, 1, /*append=*/true);
  const BuildSpec late{
      .index = kIndex, .rebuild = true, .rebuild_drift = 3, .deadline = SteadyTime::InfinitePast()};
  EXPECT_TRUE(
      absl::IsDeadlineExceeded(sequence.store().BuildIndex(kTenant, sequence.id(), late, {})));
  EXPECT_TRUE(Rebuild(sequence, {}, 3).ok());
  EXPECT_NE(Decoded(sequence), before);
  EXPECT_TRUE(absl::IsAlreadyExists(Rebuild(sequence, {}, 3)));
  const absl::Status plain =
      sequence.store().BuildIndex(kTenant, sequence.id(), {.index = kIndex}, {});
  EXPECT_TRUE(absl::IsAlreadyExists(plain)) << plain;
}

absl::Status RebuildAfter(TestSequence& sequence, uint64_t new_tokens, double drift = 0) {
  const BuildSpec spec{.index = kIndex,
                       .iterations = 6,
                       .seed = 3,
                       .rebuild = true,
                       .rebuild_drift = drift,
                       .rebuild_tokens = new_tokens};
  return sequence.store().BuildIndex(kTenant, sequence.id(), spec, {});
}

TEST(Rebuild, ByTokensOnlyWhenSoManyAreNew) {
  TestSequence sequence;
  Add(sequence, 300, 0, 1, /*append=*/false);
  sequence.Build(kIndex, 6);
  Add(sequence, 99, 0, 1, /*append=*/true);
  const std::vector<float> before = Decoded(sequence);
  const absl::Status still = RebuildAfter(sequence, 100);
  EXPECT_TRUE(absl::IsAlreadyExists(still)) << still;
  EXPECT_THAT(still.message(), ::testing::HasSubstr("99 tokens are new, fewer than 100"));
  EXPECT_EQ(Decoded(sequence), before);
  EXPECT_TRUE(absl::IsAlreadyExists(RebuildAfter(sequence, 100, 1e5)));
  EXPECT_TRUE(RebuildAfter(sequence, 99, 1e5).ok()) << "one of two conditions";
  EXPECT_TRUE(absl::IsAlreadyExists(RebuildAfter(sequence, 1)));
  // Tokens that take the place of others are new.
  sequence.Truncate(350);
  EXPECT_TRUE(absl::IsAlreadyExists(RebuildAfter(sequence, 1)));
  Add(sequence, 40, 0, 1, /*append=*/true);
  EXPECT_TRUE(RebuildAfter(sequence, 40).ok());
}

TEST(Rebuild, ByTokensOfALiveIndexCountsFromItsLastBuild) {
  TestSequence sequence(SmallSpec(), LiveOptions());
  sequence.NewSequence(Live());
  Add(sequence, 4 * kChunk, 0, 1, /*append=*/false);
  // The first build counts, also when it finds the index complete; a later one that does so does not.
  ASSERT_TRUE(sequence.store().ClosePrefill(kTenant, sequence.id()).ok());
  WaitIdle(sequence.store());
  ASSERT_TRUE(Finish(sequence).ok());
  EXPECT_TRUE(absl::IsAlreadyExists(RebuildAfter(sequence, kTail)));
  Add(sequence, kTail, 0, 1, /*append=*/true);
  WaitIdle(sequence.store());
  ASSERT_TRUE(Finish(sequence).ok());
  EXPECT_TRUE(RebuildAfter(sequence, kTail).ok());
  EXPECT_TRUE(absl::IsAlreadyExists(RebuildAfter(sequence, kTail)));
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

// ClosePrefill: the last rows of a prefill are indexed without an Append or a build.
#include "kvstore/refusal.h"
#include "tests/kvstore/index/live_parts.h"

namespace pqcached::kvstore {
namespace {

using absl::StatusCode;
using testing::Add;
using testing::Describe;
using testing::ExpectCoded;
using testing::ExpectSelects;
using testing::Finish;
using testing::Floats;
using testing::kChunk;
using testing::kIndex;
using testing::kTail;
using testing::kTenant;
using testing::LayerModel;
using testing::Live;
using testing::LiveOptions;
using testing::SmallSpec;
using testing::TestSequence;
using testing::WaitIdle;
using testing::WhilePaused;

constexpr uint32_t kRest = 100;  // tokens in the last segment

absl::Status Close(TestSequence& sequence) {
  return sequence.store().ClosePrefill(kTenant, sequence.id());
}

absl::Status Select(TestSequence& sequence) {
  const LayerModel& model = sequence.layer(1);
  const Floats query = sequence.RandomQuery(model);
  Selection selection;
  selection.index = kIndex;
  selection.budget_ratio = 0.5;
  return sequence.store()
      .TopK(kTenant, sequence.id(),
            {.layer = 1, .query_position = model.tokens - 1u, .queries = query.view()}, selection)
      .status();
}

SegmentState LastState(TestSequence& sequence) { return Describe(sequence).segments.back().state; }

TEST(ClosePrefill, TheLastSegmentIsIndexed) {
  for (const uint32_t tokens : {kRest, 2 * kChunk + kRest, 2 * kChunk}) {
    SCOPED_TRACE(tokens);
    TestSequence sequence(SmallSpec(), LiveOptions());
    sequence.NewSequence(Live());
    Add(sequence, tokens, 0, 1, /*append=*/false);
    EXPECT_EQ(LastState(sequence), SegmentState::kOpen);
    ASSERT_TRUE(Close(sequence).ok());
    WaitIdle(sequence.store());
    const SequenceInfo info = Describe(sequence);
    EXPECT_EQ(info.segments.back().state, SegmentState::kSealed);
    EXPECT_EQ(info.segments.back().tokens.end, tokens);
    ASSERT_EQ(info.indexes.size(), 1u);
    for (const LayerInfo& layer : info.layers) {
      EXPECT_EQ(layer.index_states.front(), LayerState::kReady);
    }
    ExpectCoded(sequence);
    ExpectSelects(sequence);
    Add(sequence, kRest, 0, 1, /*append=*/false);  // the next turn
    WaitIdle(sequence.store());
    ExpectCoded(sequence);
    sequence.ExpectRowsMatch();
  }
}

TEST(ClosePrefill, FromThenOnQueriesWaitForTheIndexInsteadOfMissingIt) {
  TestSequence sequence(SmallSpec(), LiveOptions());
  sequence.NewSequence(Live());
  Add(sequence, kRest, 0, 1, /*append=*/false);
  WhilePaused(sequence, [&] {
    sequence.Append(3);
    EXPECT_EQ(Select(sequence).code(), StatusCode::kFailedPrecondition);
    EXPECT_TRUE(Close(sequence).ok());
    EXPECT_EQ(LastState(sequence), SegmentState::kOpen);  // the appended rows
    const absl::Status status = Select(sequence);
    EXPECT_EQ(status.code(), StatusCode::kAborted) << status;
    EXPECT_GT(RetryMsOf(status), 0u);
  });
  WaitIdle(sequence.store());
  EXPECT_TRUE(Select(sequence).ok());
  ExpectCoded(sequence);
}

TEST(ClosePrefill, WithoutAnIncrementalIndexThePrefillStaysOpen) {
  TestSequence sequence(SmallSpec(), LiveOptions());
  Add(sequence, kRest, 0, 1, /*append=*/false);
  EXPECT_TRUE(Close(sequence).ok());
  EXPECT_EQ(LastState(sequence), SegmentState::kOpen);
  EXPECT_TRUE(Describe(sequence).indexes.empty());
}

TEST(ClosePrefill, WithoutTokensTheNextPrefillIsIndexedLikeAFirstOne) {
  TestSequence sequence(SmallSpec(), LiveOptions());
  sequence.NewSequence(Live());
  EXPECT_TRUE(Close(sequence).ok());
  EXPECT_TRUE(Describe(sequence).indexes.empty());
  Add(sequence, kRest, 0, 1, /*append=*/false);
  EXPECT_EQ(LastState(sequence), SegmentState::kOpen);
  ASSERT_TRUE(Close(sequence).ok());
  WaitIdle(sequence.store());
  ExpectCoded(sequence);
}

TEST(ClosePrefill, ARepeatLeavesTheOpenSegmentsOfLaterRowsAlone) {
  TestSequence sequence(SmallSpec(), LiveOptions());
  sequence.NewSequence(Live());
  Add(sequence, kRest, 0, 1, /*append=*/false);
  ASSERT_TRUE(Close(sequence).ok());
  ASSERT_TRUE(Close(sequence).ok());
  EXPECT_EQ(Describe(sequence).segments.size(), 1u);
  sequence.Append(3);
  ASSERT_TRUE(Close(sequence).ok());
  EXPECT_EQ(LastState(sequence), SegmentState::kOpen);
  Add(sequence, kTail, 0, 1, /*append=*/false);
  ASSERT_TRUE(Close(sequence).ok());
  EXPECT_EQ(LastState(sequence), SegmentState::kOpen);
  WaitIdle(sequence.store());
  ExpectCoded(sequence);
}

TEST(ClosePrefill, AnotherWriterHoldsItOffUntilItHasEnded) {
  TestSequence sequence(SmallSpec(), LiveOptions());
  sequence.NewSequence(Live());
  Add(sequence, kRest, 0, 1, /*append=*/false);
  {
    const auto ingest = sequence.store().BeginIngest(kTenant, sequence.id());
    ASSERT_TRUE(ingest.ok()) << ingest.status();
    const absl::Status status = Close(sequence);
    EXPECT_EQ(status.code(), StatusCode::kAborted) << status;
    EXPECT_EQ(RetryMsOf(status), kRetryConflict);
  }
  EXPECT_EQ(LastState(sequence), SegmentState::kOpen);
  ASSERT_TRUE(Close(sequence).ok());
  const auto ingest = sequence.store().BeginIngest(kTenant, sequence.id());
  ASSERT_TRUE(ingest.ok()) << ingest.status();
  EXPECT_TRUE(Close(sequence).ok());  // it has nothing to write
}

TEST(ClosePrefill, LayersWithDifferentTokenCountsAreRefusedByName) {
  TestSequence sequence(SmallSpec(), LiveOptions());
  sequence.NewSequence(Live());
  LayerModel& model = sequence.layer(1);
  const Floats keys = sequence.RandomKeys(model, kRest);
  const Floats values = sequence.RandomValues(model, kRest);
  auto ingest = sequence.store().BeginIngest(kTenant, sequence.id());
  ASSERT_TRUE(ingest.ok());
  ASSERT_TRUE((*ingest)->Write(0, {.layer = 1, .keys = keys.view(), .values = values.view()}).ok());
  ASSERT_TRUE((*ingest)->Commit().ok());
  ingest->reset();
  const absl::Status status = Close(sequence);
  EXPECT_EQ(status.code(), StatusCode::kFailedPrecondition) << status;
  EXPECT_THAT(TextOf(status), ::testing::HasSubstr("layer 3 holds 0 tokens"));
  EXPECT_EQ(LastState(sequence), SegmentState::kOpen);
  EXPECT_TRUE(Describe(sequence).indexes.empty());
}

TEST(ClosePrefill, ReturnsTheErrorOfWorkThatHasFailedAndStartsItAgain) {
  CacheSpec spec = SmallSpec();
  spec.capacity_bytes = size_t{2} << 20;
  TestSequence sequence(spec, LiveOptions());
  Add(sequence, 2 * kChunk, 0, 1, /*append=*/false);  // takes half of the pool
  const uint64_t other = sequence.id();
  sequence.NewSequence(Live());
  Add(sequence, 2 * kChunk, 0, 1, /*append=*/false);
  WaitIdle(sequence.store());
  EXPECT_EQ(Close(sequence).code(), StatusCode::kResourceExhausted);
  EXPECT_EQ(LastState(sequence), SegmentState::kOpen);
  WaitIdle(sequence.store());
  ASSERT_TRUE(sequence.store().DropSequence(kTenant, other).ok());
  EXPECT_EQ(Close(sequence).code(), StatusCode::kResourceExhausted);  // of the work before
  WaitIdle(sequence.store());
  ASSERT_TRUE(Close(sequence).ok());
  WaitIdle(sequence.store());
  ExpectCoded(sequence);
  sequence.ExpectRowsMatch();
}

TEST(ClosePrefill, BuildIndexWaitsForWhatItHasBegun) {
  TestSequence sequence(SmallSpec(), LiveOptions());
  sequence.NewSequence(Live());
  Add(sequence, 2 * kChunk + kRest, 0, 1, /*append=*/false);
  ASSERT_TRUE(Close(sequence).ok());
  ASSERT_TRUE(Finish(sequence).ok());
  EXPECT_TRUE(Select(sequence).ok());
}

}  // namespace
}  // namespace pqcached::kvstore

// Steps over mapped memory whose query tokens have a selection each.
#include <gtest/gtest.h>

#include <cmath>
#include <iterator>
#include <vector>

#include "tests/client/per_token_case.h"
#include "tests/client/step/step_fixture.h"

namespace pqcached {
namespace {

using testing::DecodeArguments;
using testing::DecodeItem;
using testing::Expect;
using testing::ExpectAttention;
using testing::ExpectFullWithOwn;
using testing::ExpectOwnSelections;
using testing::FillModel;
using testing::ItemsOf;
using testing::kSink;
using testing::kWindow;
using testing::Layer;
using testing::MakeModel;
using testing::Model;
using testing::Must;
using testing::MustBeOk;
using testing::RoomFor;
using testing::StepTest;

class PerTokenTest : public StepTest {
 protected:
  const Selection few_ = {.sink_tokens = kSink, .window_tokens = kWindow, .ratio = 0.2};
  const Model model_ = MakeModel(340, 1), other_ = MakeModel(340, 11), tiny_ = MakeModel(40, 21);
};

// One item on all threads, and several items, each on one.
TEST_F(PerTokenTest, EachTokenSelectsWhatItSelectsAlone) {
  Sequence first = FillModel(cache_, model_, 300, kSink),
           second = FillModel(cache_, other_, 250, kSink),
           third = FillModel(cache_, model_, 200, 4);
  const std::vector<DecodeItem> batches[] = {
      {{&first, &model_, 300, 4}},
      {{&first, &model_, 300, 8}, {&second, &other_, 250}, {&third, &model_, 200, 3}}};
  Selection one = few_, excluding = few_;
  one.retrieved_tokens = 1;
  excluding.excluded = {{2, 7}, {100, 120}, {290, 302}};
  for (const auto& batch : batches) {
    for (const Selection& selection : {few_, one, excluding}) {
      for (uint32_t layer = 0; layer < 2; ++layer) {
        ExpectOwnSelections(client_, batch, layer, selection, /*differ=*/true);
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST_F(PerTokenTest, WithAllCandidatesAttentionIsFull) {
  Sequence first = FillModel(cache_, model_, 300, kSink),
           second = FillModel(cache_, other_, 250, kSink),
           third = FillModel(cache_, tiny_, 9, kSink);
  for (const uint64_t window : {1u, 2u, 16u, 64u}) {
    const Selection all = {.sink_tokens = kSink, .window_tokens = window, .ratio = 1.0};
    ExpectFullWithOwn(client_,
                      {{&first, &model_, 300, 4}, {&second, &other_, 250}, {&third, &tiny_, 9, 8}},
                      0, all, PQC_STEP_SELECT_PER_TOKEN);
    if (HasFatalFailure()) return;
  }
}

// Contexts around sink + window tokens: nothing between them, one token, and a budget that keeps
// none.
TEST_F(PerTokenTest, ShortContextsHaveLittleToSelect) {
  for (uint64_t position = 1; position < kSink + kWindow + 3; ++position) {
    Sequence sequence = FillModel(cache_, tiny_, position, kSink);
    for (const double ratio : {0.2, 1.0}) {
      const Selection selection = {.sink_tokens = kSink, .window_tokens = kWindow, .ratio = ratio};
      ExpectOwnSelections(client_, {{&sequence, &tiny_, position, 3}}, 0, selection,
                          /*differ=*/false);
      ASSERT_FALSE(HasFatalFailure()) << "position " << position;
    }
  }
}

TEST_F(PerTokenTest, WithoutTheFlagTheTokensShareASelection) {
  Sequence sequence = FillModel(cache_, model_, 300, kSink);
  const std::vector<DecodeItem> batch = {{&sequence, &model_, 300, 4}};
  const DecodeArguments from(batch, 0);
  const auto select = [&](uint64_t flags) {
    Step step = Must(client_.BeginStep(ItemsOf(batch), &few_, 0, flags));
    return Must(step.TopK(0, from.query_tensor()));
  };
  const Step::Positions own = select(PQC_STEP_SELECT_PER_TOKEN), shared = select(0);
  EXPECT_EQ(shared.counts, own.counts);
  EXPECT_EQ(shared.positions.size(), size_t{Layer::kKvHeads} * shared.counts[0]);
  EXPECT_EQ(own.positions.size(), 4 * shared.positions.size());
  const Selected expected = Must(sequence.TopK(from.cases[0].query(), few_));
  EXPECT_EQ(shared.positions, expected.positions);
}

// The rows of the decoded tokens arrive, and accepted ones are attended to by the next step.
TEST_F(PerTokenTest, DecodedStepsGoOn) {
  Sequence sequence = FillModel(cache_, model_, 300, kSink);
  for (uint64_t position = 300; position < 330 && !HasFatalFailure(); position += 2) {
    const std::vector<DecodeItem> batch = {{&sequence, &model_, position, 4}};
    for (const Selection& selection : {few_, selection_}) {
      ExpectOwnSelections(client_, batch, 0, selection, /*differ=*/selection.ratio < 1.0);
    }
    Step step = Must(client_.BeginStep(ItemsOf(batch), &few_, 0, PQC_STEP_SELECT_PER_TOKEN));
    for (uint32_t layer = 0; layer < 2; ++layer) {
      Attention attention;
      MustBeOk(DecodeLayer(step, layer, DecodeArguments(batch, layer), &attention));
    }
    const uint32_t accepted[] = {2};
    MustBeOk(step.End({}, accepted));
  }
  MustBeOk(sequence.Flush());
  EXPECT_EQ(Must(sequence.Describe()).token_count, 330u);
}

TEST_F(PerTokenTest, OtherFlagsMeanWhatTheyMeanAlone) {
  Sequence bare = Must(cache_.CreateSequence());
  for (uint32_t layer = 0; layer < 2; ++layer) {
    MustBeOk(bare.Ingest(layer, 0, model_[layer].keys(0, 300), model_[layer].values(0, 300)));
  }
  ExpectFullWithOwn(client_, {{&bare, &model_, 300, 4}}, 1, few_,
                    PQC_STEP_SELECT_PER_TOKEN | PQC_STEP_EXACT_UNTIL_INDEXED);
  Sequence sequence = FillModel(cache_, model_, 300, kSink);
  const std::vector<DecodeItem> batch = {{&sequence, &model_, 300, 4}};
  const DecodeArguments from(batch, 0);
  const auto alone = testing::SelectAlone(client_, batch, from, 0, few_);
  Step step = Must(
      client_.BeginStep(ItemsOf(batch), &few_, 0, PQC_STEP_SELECT_PER_TOKEN | PQC_STEP_NO_WAIT));
  Attention attention = RoomFor(4);
  MustBeOk(step.Attend(0, from.query_tensor(), attention.output, attention.lse));
  ExpectAttention(attention, alone.attention, 1e-5f);
}

TEST_F(PerTokenTest, WhatIsNotSupportedIsNamed) {
  Sequence sequence = FillModel(cache_, model_, 300, kSink),
           second = FillModel(cache_, model_, 300, kSink);
  const std::vector<DecodeItem> batch = {{&sequence, &model_, 300, 2}, {&second, &model_, 300, 4}};
  DecodeArguments from(batch, 0);
  Expect(client_.BeginStep(ItemsOf(batch), &few_, 0, PQC_STEP_DECODES * 2).status(),
         PQC_UNIMPLEMENTED, "options.flags", "16 has flags");
  Step step = Must(client_.BeginStep(ItemsOf(batch), &few_, 0, PQC_STEP_SELECT_PER_TOKEN));
  Expect(step.TopKPages(0, from.query_tensor(), {}).status(), PQC_UNIMPLEMENTED, "step",
         "PQC_STEP_SELECT_PER_TOKEN");
  from.queries.back() = NAN;  // of the second item's last token
  Attention attention = RoomFor(6);
  Expect(step.Attend(0, from.query_tensor(), attention.output, attention.lse), PQC_INVALID_ARGUMENT,
         "items[1].queries", "query head 5");
  Expect(step.TopK(0, from.query_tensor()).status(), PQC_INVALID_ARGUMENT, "items[1].queries",
         "query head 5");
  Expect(DecodeLayer(step, 0, from, &attention), PQC_INVALID_ARGUMENT, "items[1].queries",
         "query head 5");
}

}  // namespace
}  // namespace pqcached

// Complete attention of decode steps against a real pqcached, and selections of each query token, on
// both paths.
#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "pqcached/client.hpp"
#include "tests/client/daemon.h"
#include "tests/client/decode_case.h"
#include "tests/client/per_token_case.h"

namespace pqcached {
namespace {

using testing::Daemon;
using testing::DecodeArguments;
using testing::DecodeItem;
using testing::DecodeLayer;
using testing::ExpectAttention;
using testing::ExpectFullStep;
using testing::ExpectFullWithOwn;
using testing::ExpectOwnSelections;
using testing::FillModel;
using testing::FullAttention;
using testing::ItemsOf;
using testing::Layer;
using testing::MakeModel;
using testing::Model;
using testing::Must;
using testing::MustBeOk;
using testing::RoomFor;
using testing::SpecOf;
using testing::TypedPlace;

constexpr uint64_t kSink = 4, kWindow = 16;

class DaemonDecodeTest : public ::testing::TestWithParam<pqc_path_choice> {
 protected:
  bool local() const { return GetParam() == PQC_PATH_ONLY_LOCAL; }

  Daemon daemon_;
  Client client_ = daemon_.OpenClient("default", GetParam());
  Cache cache_ = Must(client_.OpenCache(SpecOf("cache", {0, 1})));
  const Selection selection_ = {.sink_tokens = kSink, .window_tokens = kWindow, .ratio = 1.0};
};

TEST_P(DaemonDecodeTest, BatchesGetFullAttentionAndLocalOnesWaitForNoRpc) {
  const Model first = MakeModel(420, 1), second = MakeModel(420, 11), third = MakeModel(420, 21);
  Sequence a = FillModel(cache_, first, 300, kSink), b = FillModel(cache_, second, 250, kSink),
           c = FillModel(cache_, third, 9, kSink);
  const auto step = [&](uint32_t number) {
    ExpectFullStep(client_,
                   {{&a, &first, 300 + number},
                    {&b, &second, 250 + 3 * number, 3},
                    {&c, &third, 9 + 2 * number, 2}},
                   selection_);
  };
  step(0);
  const uint64_t before = Must(client_.Count()).rpcs;
  for (uint32_t number = 1; number < 40 && !HasFatalFailure(); ++number) step(number);
  if (local()) {
    EXPECT_EQ(Must(client_.Count()).rpcs, before);
  }
  MustBeOk(a.Flush());
  EXPECT_EQ(Must(a.Describe()).token_count, 340u);
}

TEST_P(DaemonDecodeTest, SinkAndWindowOfAnySize) {
  const Model model = MakeModel(330, 1), tiny = MakeModel(40, 5);
  for (const uint64_t sink : {0u, 1u, 4u, 64u, 1000u}) {
    for (const uint64_t window : {1u, 2u, 16u, 64u, 1000u}) {
      SCOPED_TRACE(::testing::Message() << "sink " << sink << " window " << window);
      const Selection selection = {.sink_tokens = sink, .window_tokens = window, .ratio = 1.0};
      Sequence sequence = FillModel(cache_, model, 300, sink),
               short_one = FillModel(cache_, tiny, 3, sink),
               other = FillModel(cache_, model, 280, sink);
      for (uint32_t number = 0; number < 4 && !HasFatalFailure(); ++number) {
        ExpectFullStep(client_,
                       {{&sequence, &model, 300 + number},
                        {&short_one, &tiny, 3 + 2 * number, 2},
                        {&other, &model, 280 + 5 * number, 5}},
                       selection);
      }
    }
  }
}

// The index of the first item is needed, and that of the others is not.
TEST_P(DaemonDecodeTest, ItemsWithNothingToSelectNeedNoIndex) {
  const Model model = MakeModel(330, 1), tiny = MakeModel(40, 5);
  Sequence empty = Must(cache_.CreateSequence()), sequence = FillModel(cache_, model, 300, kSink),
           none = Must(cache_.CreateSequence());
  for (uint32_t number = 0; number < kSink + kWindow && !HasFatalFailure(); ++number) {
    ExpectFullStep(
        client_,
        {{&empty, &tiny, number}, {&sequence, &model, 300 + number}, {&none, &tiny, number}},
        selection_, /*with_step=*/false);
  }
  // Now two of three have something to select, and one of these has no index.
  Sequence fresh = Must(cache_.CreateSequence());
  const std::vector<DecodeItem> batch = {
      {&fresh, &tiny, 0}, {&sequence, &model, 320}, {&none, &tiny, 20}};
  Step step = Must(client_.BeginStep(ItemsOf(batch), nullptr));
  Attention attention;
  const Status status = DecodeLayer(step, 0, DecodeArguments(batch, 0), &attention, &selection_);
  EXPECT_EQ(status.code(), PQC_FAILED_PRECONDITION) << status.ToString();
  EXPECT_EQ(status.field().substr(0, 8), "items[2]") << status.ToString();
}

TEST_P(DaemonDecodeTest, OutputsAreTensorsOfTheEngine) {
  const Model model = MakeModel(330, 1);
  Sequence first = FillModel(cache_, model, 300, kSink),
           second = FillModel(cache_, model, 200, kSink);
  for (const pqc_dtype dtype : {PQC_F32, PQC_F16, PQC_BF16}) {
    SCOPED_TRACE(dtype);
    const std::vector<DecodeItem> batch = {{&first, &model, 300, 2}, {&second, &model, 200}};
    Step step = Must(client_.BeginStep(ItemsOf(batch), &selection_));
    for (uint32_t layer = 0; layer < 2; ++layer) {
      const DecodeArguments from(batch, layer);
      TypedPlace place(from.tokens, dtype);
      MustBeOk(step.Decode(layer, from.query_tensor(), from.key_tensor(), from.value_tensor(),
                           place.memory()));
      ExpectAttention(place.Contents(), FullAttention(batch, from, layer), place.tolerance());
    }
  }
}

// The tokens of a speculation are accepted in part; the next step begins behind them.
TEST_P(DaemonDecodeTest, RolledBackTokensAreNotAttendedTo) {
  const Model model = MakeModel(360, 1);
  Model other = MakeModel(360, 31);  // of another speculation
  Sequence sequence = FillModel(cache_, model, 300, kSink);
  for (uint64_t position = 300; position < 330 && !HasFatalFailure(); ++position) {
    ExpectFullStep(client_, {{&sequence, &model, position, 4}}, selection_, true, {1});
  }
  ExpectFullStep(client_, {{&sequence, &model, 310, 2}}, selection_);  // 20 tokens back
  Step abandoned = Must(client_.BeginStep(ItemsOf({{&sequence, &other, 312}}), &selection_));
  Attention attention;
  MustBeOk(DecodeLayer(abandoned, 0, DecodeArguments({{&sequence, &other, 312}}, 0), &attention));
  { const Step closed = std::move(abandoned); }
  ExpectFullStep(client_, {{&sequence, &model, 312, 8}}, selection_);
  ExpectFullStep(client_, {{&sequence, &model, 320, 1}}, selection_);
}

// Steps whose query tokens have a selection each.
class DaemonPerTokenTest : public DaemonDecodeTest {
 protected:
  const Selection few_ = {.sink_tokens = kSink, .window_tokens = kWindow, .ratio = 0.2};
  const Model model_ = MakeModel(340, 1), other_ = MakeModel(340, 11), tiny_ = MakeModel(40, 21);
};

TEST_P(DaemonPerTokenTest, EachTokenSelectsWhatItSelectsAlone) {
  Sequence first = FillModel(cache_, model_, 300, kSink),
           second = FillModel(cache_, other_, 250, kSink),
           third = FillModel(cache_, tiny_, 9, kSink);
  const std::vector<DecodeItem> batch = {
      {&third, &tiny_, 9, 2}, {&first, &model_, 300, 4}, {&second, &other_, 250, 8}};
  Selection excluding = few_;
  excluding.excluded = {{2, 7}, {100, 120}, {290, 302}};
  ExpectOwnSelections(client_, batch, 0, few_, /*differ=*/true);
  ExpectOwnSelections(client_, batch, 1, excluding, /*differ=*/true);
  ExpectOwnSelections(client_, {{&first, &model_, 300, 4}}, 0, selection_, /*differ=*/false);
}

TEST_P(DaemonPerTokenTest, WithAllCandidatesAttentionIsFull) {
  Sequence first = FillModel(cache_, model_, 300, kSink),
           second = FillModel(cache_, other_, 250, kSink),
           third = FillModel(cache_, tiny_, 9, kSink);
  ExpectFullWithOwn(client_,
                    {{&first, &model_, 300, 4}, {&third, &tiny_, 9, 8}, {&second, &other_, 250}}, 0,
                    selection_, PQC_STEP_SELECT_PER_TOKEN);
}

// An index that is missing: all items of the call take all candidates, on the remote path.
TEST_P(DaemonPerTokenTest, WithoutAnIndexStepsMayAttendExactly) {
  Sequence bare = Must(cache_.CreateSequence()), indexed = FillModel(cache_, other_, 250, kSink);
  for (uint32_t layer = 0; layer < 2; ++layer) {
    MustBeOk(bare.Ingest(layer, 0, model_[layer].keys(0, 300), model_[layer].values(0, 300)));
  }
  ExpectFullWithOwn(client_, {{&bare, &model_, 300, 4}}, 1, few_,
                    PQC_STEP_SELECT_PER_TOKEN | PQC_STEP_EXACT_UNTIL_INDEXED);
}

// More query tokens than one rpc takes items.
TEST_P(DaemonPerTokenTest, LargeBatches) {
  constexpr uint32_t kSequences = 40, kTokens = 7;
  Sequence first = FillModel(cache_, model_, 120, kSink);
  std::vector<Sequence> forks;
  for (uint32_t i = 0; i < kSequences; ++i) forks.push_back(Must(first.Fork()));
  std::vector<DecodeItem> batch;
  for (Sequence& fork : forks) batch.push_back({&fork, &model_, 120, kTokens});
  ExpectOwnSelections(client_, batch, 1, few_, /*differ=*/true);
}

TEST_P(DaemonPerTokenTest, RefusedQueriesNameTheStepsItem) {
  Sequence first = FillModel(cache_, model_, 300, kSink),
           second = FillModel(cache_, model_, 300, kSink);
  const std::vector<DecodeItem> batch = {{&first, &model_, 300, 2}, {&second, &model_, 300, 4}};
  DecodeArguments from(batch, 0);
  from.queries.back() = NAN;
  Step step = Must(client_.BeginStep(ItemsOf(batch), &few_, 0, PQC_STEP_SELECT_PER_TOKEN));
  Attention attention = RoomFor(6);
  const auto expect_named = [](const Status& status) {
    EXPECT_EQ(status.code(), PQC_INVALID_ARGUMENT) << status.ToString();
    EXPECT_EQ(status.field().substr(0, 8), "items[1]") << status.ToString();
  };
  expect_named(step.Attend(0, from.query_tensor(), attention.output, attention.lse));
  expect_named(step.TopK(0, from.query_tensor()).status());
}

INSTANTIATE_TEST_SUITE_P(Paths, DaemonDecodeTest,
                         ::testing::Values(PQC_PATH_ONLY_REMOTE, PQC_PATH_ONLY_LOCAL),
                         [](const auto& path) {
                           return path.param == PQC_PATH_ONLY_LOCAL ? "Local" : "Remote";
                         });

INSTANTIATE_TEST_SUITE_P(Paths, DaemonPerTokenTest,
                         ::testing::Values(PQC_PATH_ONLY_REMOTE, PQC_PATH_ONLY_LOCAL),
                         [](const auto& path) {
                           return path.param == PQC_PATH_ONLY_LOCAL ? "Local" : "Remote";
                         });

}  // namespace
}  // namespace pqcached

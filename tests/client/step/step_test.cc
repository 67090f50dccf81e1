// Steps over mapped memory: batches, speculation, rows in the background, what goes wrong, and the
// decoder on top.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <vector>

#include "client/step/sender.h"
#include "tests/client/step/step_fixture.h"

namespace pqcached {
namespace {

using testing::Expect;
using testing::kOutput;
using testing::kSink;
using testing::kWindow;
using testing::Layer;
using testing::Must;
using testing::MustBeOk;
using testing::OpenStoreClient;
using testing::Range;
using testing::Sidecar;
using testing::SmallSegments;
using testing::SpecOf;
using testing::StepTest;

// Sink and window as the engine attends them, for a context of `tokens`.
std::vector<std::vector<uint32_t>> Own(uint64_t tokens) {
  std::vector<uint32_t> own = Range(0, kSink);
  for (const uint32_t token : Range(tokens - kWindow, tokens)) own.push_back(token);
  return {Layer::kKvHeads, own};
}

// A client that does not wait long.
class ImpatientStepTest : public StepTest {
 protected:
  ImpatientStepTest() : StepTest(30) {}
};

TEST_F(StepTest, ABatchOfDifferentLengthsGivesWhatEachSequenceGivesAlone) {
  const Layer layers[] = {Layer(900, 1), Layer(400, 2), Layer(650, 3)};
  Sequence sequences[] = {Fill(layers[0], 800), Fill(layers[1], 300), Fill(layers[2], 600)};
  const uint64_t positions[] = {800, 300, 600};
  const uint32_t lengths[] = {1, 3, 2};
  std::vector<StepItem> items;
  std::vector<float> queries;
  for (int i = 0; i < 3; ++i) {
    items.push_back({&sequences[i], positions[i], lengths[i]});
    for (uint32_t token = 0; token < lengths[i]; ++token) {
      const auto* numbers = static_cast<const float*>(layers[i].queries().c().ptr);
      queries.insert(queries.end(), numbers, numbers + Layer::kQueryHeads * Layer::kKeyDim);
    }
  }
  const Selection selection = {.sink_tokens = kSink, .window_tokens = kWindow, .ratio = 0.2};
  const Tensor all(queries, {6, Layer::kQueryHeads, Layer::kKeyDim});
  std::vector<float> output(6 * kOutput), lse(6 * Layer::kQueryHeads);
  std::vector<float> beside(output.size()), beside_lse(lse.size());
  Step step = Must(client_.BeginStep(items, &selection));
  MustBeOk(step.Attend(1, all, output, lse));
  MustBeOk(step.AttendBegin(1, all, beside, beside_lse));
  MustBeOk(step.AttendWait());
  EXPECT_EQ(output, beside);
  EXPECT_EQ(lse, beside_lse);
  const Step::Positions selected = Must(step.TopK(1, all));
  uint64_t token = 0;
  for (int i = 0; i < 3; ++i) {
    const size_t one = Layer::kQueryHeads * Layer::kKeyDim;
    const Query query = {.layer = 1,
                         .query_position = positions[i],
                         .queries = {std::span(queries).subspan(token * one, lengths[i] * one),
                                     {lengths[i], Layer::kQueryHeads, Layer::kKeyDim}}};
    const Attention alone = Must(sequences[i].Attend(query, selection));
    const Selected chosen = Must(sequences[i].TopK(query, selection));
    ASSERT_EQ(selected.counts[i], chosen.count);
    EXPECT_TRUE(
        std::equal(chosen.positions.begin(), chosen.positions.end(),
                   selected.positions.begin() + static_cast<ptrdiff_t>(selected.offsets[i])));
    for (size_t j = 0; j < alone.output.size(); ++j) {
      ASSERT_NEAR(output[token * kOutput + j], alone.output[j], 1e-5f) << i << " " << j;
    }
    token += lengths[i];
  }
  std::vector<LayerRows> rows;
  std::vector<float> keys, values;
  for (int i = 0; i < 3; ++i) {
    const float* k = layers[i].key(positions[i], 0);
    const float* v = layers[i].value(positions[i], 0);
    keys.insert(keys.end(), k, k + lengths[i] * Layer::kKvHeads * Layer::kKeyDim);
    values.insert(values.end(), v, v + lengths[i] * Layer::kKvHeads * Layer::kValueDim);
  }
  for (uint32_t number = 0; number < kLayers; ++number) {
    rows.push_back({number,
                    {keys, {6, Layer::kKvHeads, Layer::kKeyDim}},
                    {values, {6, Layer::kKvHeads, Layer::kValueDim}}});
  }
  const uint32_t accepted[] = {1, 2, 0};
  MustBeOk(step.End(rows, accepted));
  const uint64_t ends[] = {801, 302, 600};
  for (int i = 0; i < 3; ++i) {
    MustBeOk(sequences[i].Flush());
    EXPECT_EQ(Must(sequences[i].Describe()).token_count, ends[i]);
    ExpectRows(sequences[i], layers[i], 0, ends[i]);
  }
}

TEST_F(StepTest, NoStepWaitsForACallAndEveryRowArrives) {
  const Layer layer(900, 4);
  Sequence sequence = Fill(layer, 300);
  MustBeOk(Decode(sequence, layer, 300));  // takes the lease
  const uint64_t before = Must(client_.Count()).rpcs;
  for (uint64_t position = 301; position < 900; ++position) {
    MustBeOk(Decode(sequence, layer, position));
    if (position % 100 != 0) continue;
    Attention attention{.output = output_, .lse = lse_};
    attention.Merge(layer.Attend(Own(position + 1)));
    const Attention full = layer.Attend({Layer::kKvHeads, Range(0, position + 1)});
    for (size_t i = 0; i < kOutput; ++i) {
      ASSERT_NEAR(attention.output[i], full.output[i], 1e-4f) << position;
    }
  }
  EXPECT_EQ(Must(client_.Count()).rpcs, before);
  EXPECT_GT(Must(client_.Count()).background_rpcs, 0u);
  MustBeOk(sequence.Flush());
  EXPECT_EQ(Must(sequence.Describe()).token_count, 900u);
  ExpectRows(sequence, layer, 0, 900);
}

TEST_F(StepTest, SpeculationKeepsWhatWasAcceptedAndRollsBackWhatWasHandedIn) {
  const Layer layer(500, 5), wrong(500, 6);
  Sequence sequence = Fill(layer, 300);
  MustBeOk(Decode(sequence, layer, 300, 4, {2}));
  MustBeOk(Decode(sequence, wrong, 302, 8));       // all handed in
  MustBeOk(Decode(sequence, layer, 303, 5, {5}));  // only the first of them was right
  MustBeOk(sequence.Flush());
  EXPECT_EQ(Must(sequence.Describe()).token_count, 308u);
  ExpectRows(sequence, layer, 0, 302);
  ExpectRows(sequence, wrong, 302, 303);
  ExpectRows(sequence, layer, 303, 308);
  MustBeOk(Decode(sequence, layer, 308));
}

TEST_F(StepTest, RowsAreSentAgainAfterUnavailableAndRepeatsChangeNothing) {
  const Layer layer(360, 7);
  Sequence sequence = Fill(layer, 300);
  sidecar_.unavailable_appends = 3;
  MustBeOk(Decode(sequence, layer, 300));
  MustBeOk(sequence.Flush());
  sidecar_.lost_answers = 2;
  for (uint64_t position = 301; position < 360; ++position) {
    MustBeOk(Decode(sequence, layer, position));
  }
  MustBeOk(sequence.Flush());
  EXPECT_EQ(Must(sequence.Describe()).token_count, 360u);
  ExpectRows(sequence, layer, 0, 360);
}

TEST_F(StepTest, AStepWaitsForTheRowsThatItNeeds) {
  const Layer layer(400, 8);
  Sequence sequence = Fill(layer, 300);
  sidecar_.CloseGate();
  // The window hides what is not stored yet.
  for (uint64_t position = 300; position < 300 + kWindow; ++position) {
    MustBeOk(Decode(sequence, layer, position));
  }
  const StepItem items[] = {{&sequence, 300 + kWindow}};
  Expect(client_.BeginStep(items, &selection_, 20).status(), PQC_DEADLINE_EXCEEDED,
         "items[0].query_position");
  sidecar_.OpenGate();
  for (uint64_t position = 300 + kWindow; position < 400; ++position) {
    MustBeOk(Decode(sequence, layer, position));
  }
  MustBeOk(sequence.Flush());
  ExpectRows(sequence, layer, 0, 400);
}

TEST_F(ImpatientStepTest, FlushEndsAtItsDeadlineAndLaterTellsThatAllIsStored) {
  const Layer layer(310, 9);
  Sequence sequence = Fill(layer, 300);
  sidecar_.CloseGate();
  MustBeOk(Decode(sequence, layer, 300));
  Expect(sequence.Flush(), PQC_DEADLINE_EXCEEDED, "", "not stored in time");
  Expect(sequence.Truncate(290), PQC_DEADLINE_EXCEEDED, "", "not stored in time");
  sidecar_.OpenGate();
  Status flushed = sequence.Flush();
  for (int i = 0; i < 100 && !flushed.ok(); ++i) flushed = sequence.Flush();
  MustBeOk(flushed);
  ExpectRows(sequence, layer, 0, 301);
}

TEST_F(StepTest, WrongItemsAreNamedAndNothingChanges) {
  const Layer layer(320, 10);
  Sequence sequence = Fill(layer, 300), other = Fill(layer, 300);
  const auto begin = [&](std::vector<StepItem> items) {
    return client_.BeginStep(items, &selection_).status();
  };
  Expect(begin({}), PQC_INVALID_ARGUMENT, "items");
  Expect(begin({{nullptr, 300}}), PQC_INVALID_ARGUMENT, "items[0].sequence");
  Expect(begin({{&sequence, 300}, {&other, 300}, {&sequence, 300}}), PQC_INVALID_ARGUMENT,
         "items[2].sequence");
  Expect(begin({{&other, 300}, {&sequence, 301}}), PQC_INVALID_ARGUMENT, "items[1].query_position");
  Expect(begin({{&sequence, 300, 9}}), PQC_INVALID_ARGUMENT, "items[0].query_length");
  Expect(begin({{&sequence, uint64_t{1} << 31}}), PQC_INVALID_ARGUMENT, "items[0].query_position");
  Sidecar second_sidecar(SmallSegments());
  Client second = OpenStoreClient(second_sidecar);
  const StepItem foreign[] = {{&sequence, 300}};
  Expect(second.BeginStep(foreign).status(), PQC_INVALID_ARGUMENT, "items[0].sequence",
         "belongs to another client");
  Cache another = Must(client_.OpenCache(SpecOf("another", {0, 1})));
  Sequence elsewhere = Must(another.CreateSequence());
  Expect(begin({{&sequence, 300}, {&elsewhere, 0}}), PQC_INVALID_ARGUMENT, "items[1].sequence",
         "belongs to another cache");
  const Selection no_index = {.index = Index::Pq(4, 6), .ratio = 0.5};
  const StepItem items[] = {{&sequence, 300}};
  Expect(client_.BeginStep(items, &no_index).status(), PQC_FAILED_PRECONDITION, "items[0]",
         "build it");
  MustBeOk(sequence.Suspend());
  Expect(begin({{&other, 300}, {&sequence, 300}}), PQC_FAILED_PRECONDITION, "items[1].sequence");
  EXPECT_EQ(Must(sequence.Resume()), 300u);
  {
    Step step = Must(client_.BeginStep(items, &selection_));
    Expect(begin({{&sequence, 300}}), PQC_ABORTED, "items[0].sequence", "in another step");
    Expect(sequence.Truncate(299), PQC_ABORTED, "sequence", "a step");
  }
  MustBeOk(Decode(sequence, layer, 300));
}

TEST_F(StepTest, WrongTensorsOfAStepAreNamed) {
  const Layer layer(320, 11);
  Sequence sequence = Fill(layer, 300);
  const StepItem items[] = {{&sequence, 300}};
  std::vector<float> output(kOutput), lse(Layer::kQueryHeads);
  {
    Step step = Must(client_.BeginStep(items));
    Expect(step.Attend(0, layer.queries(), output, lse), PQC_INVALID_ARGUMENT, "selection");
    Expect(step.Attend(7, layer.queries(), output, lse, &selection_), PQC_INVALID_ARGUMENT,
           "layer");
    Expect(step.Attend(0, layer.keys(0, 1), output, lse, &selection_), PQC_INVALID_ARGUMENT,
           "queries.shape");
    Expect(step.Attend(0, layer.queries(), std::span(output).first(5), lse, &selection_),
           PQC_OUT_OF_RANGE, "out.output_capacity");
    Expect(step.AttendWait(), PQC_FAILED_PRECONDITION, "step", "begun");
    MustBeOk(step.Attend(0, layer.queries(), output, lse, &selection_));
    Expect(step.End(std::span<const LayerRows>(Rows(layer, 300, 301)).first(1)),
           PQC_INVALID_ARGUMENT, "layer_count");
  }
  {
    Step step = Must(client_.BeginStep(items));
    Expect(step.End(Rows(layer, 300, 302)), PQC_INVALID_ARGUMENT, "layers[0].keys.shape[0]");
  }
  {
    Step step = Must(client_.BeginStep(items));
    const uint32_t accepted[] = {2};
    Expect(step.End(Rows(layer, 300, 301), accepted), PQC_INVALID_ARGUMENT, "accepted[0]");
  }
  EXPECT_EQ(Must(sequence.Describe()).token_count, 300u);
  MustBeOk(Decode(sequence, layer, 300));
}

TEST_F(StepTest, RefusedRowsAreToldByFlushAndTheNextStep) {
  const Layer layer(320, 12);
  Sequence sequence = Fill(layer, 300);
  const StepItem items[] = {{&sequence, 300}};
  std::vector<float> bad(Layer::kKvHeads * Layer::kKeyDim, std::nanf(""));
  std::vector<LayerRows> rows = Rows(layer, 300, 301);
  rows[1].keys = {bad, {1, Layer::kKvHeads, Layer::kKeyDim}};
  Step step = Must(client_.BeginStep(items, &selection_));
  MustBeOk(step.End(rows));
  Expect(sequence.Flush(), PQC_INVALID_ARGUMENT, "layers[1].keys");
  EXPECT_EQ(Must(sequence.Describe()).token_count, 300u);
  MustBeOk(Decode(sequence, layer, 300));
  MustBeOk(sequence.Flush());
}

TEST_F(StepTest, AStepThatEndsAfterAFailureChangesNothing) {
  const Layer layer(320, 12), other(320, 22);
  Sequence sequence = Fill(layer, 300);
  std::vector<float> bad(Layer::kKvHeads * Layer::kKeyDim, std::nanf(""));
  std::vector<LayerRows> rows = Rows(layer, 300, 301);
  rows[1].keys = {bad, {1, Layer::kKvHeads, Layer::kKeyDim}};
  sidecar_.CloseGate();
  {
    const StepItem items[] = {{&sequence, 300}};
    MustBeOk(Must(client_.BeginStep(items, nullptr)).End(rows));
  }
  const StepItem items[] = {{&sequence, 299}};  // would roll back
  Step step = Must(client_.BeginStep(items, nullptr));
  sidecar_.OpenGate();
  EXPECT_EQ(handle_->state->sender->WaitStored(*sequence.get()->state, 301,
                                               std::chrono::steady_clock::time_point::max()),
            PQC_INVALID_ARGUMENT);
  MustBeOk(step.End(Rows(other, 299, 300)));
  Expect(sequence.Flush(), PQC_INVALID_ARGUMENT, "layers[1].keys");
  ExpectRows(sequence, layer, 0, 300);
  EXPECT_EQ(Must(sequence.Describe()).token_count, 300u);
}

TEST_F(StepTest, ResultsOfALostSessionOrARevokedLeaseMustNotBeUsed) {
  const Layer layer(320, 13);
  Sequence sequence = Fill(layer, 300);
  const StepItem items[] = {{&sequence, 300}};
  std::vector<float> output(kOutput), lse(Layer::kQueryHeads);
  {
    Step step = Must(client_.BeginStep(items, &selection_));
    MustBeOk(step.Attend(0, layer.queries(), output, lse));
    ASSERT_TRUE(sidecar_.store->TruncateSequence(testing::kTestTenant, sequence.id(), 280).ok());
    Expect(step.Attend(1, layer.queries(), output, lse), PQC_ABORTED, "items[0].sequence",
           "revoked");
    Expect(step.End(Rows(layer, 300, 301)), PQC_ABORTED, "items[0].sequence", "revoked");
  }
  MustBeOk(Decode(sequence, layer, 280));
  MustBeOk(sequence.Flush());
  EXPECT_EQ(Must(sequence.Describe()).token_count, 281u);
  const StepItem later[] = {{&sequence, 281}};
  Step step = Must(client_.BeginStep(later, &selection_));
  MustBeOk(step.Attend(0, layer.queries(), output, lse));
  sidecar_.knows_session = false;
  sidecar_.ended = true;
  Expect(step.End(Rows(layer, 281, 282)), PQC_UNAVAILABLE, "");
  Expect(client_.BeginStep(later, &selection_).status(), PQC_UNAVAILABLE, "", "session is lost");
}

TEST_F(StepTest, StepsAndHandlesMayEndInAnyOrder) {
  const Layer layer(320, 14);
  auto sequence = std::make_unique<Sequence>(Fill(layer, 300));
  const StepItem items[] = {{sequence.get(), 300}};
  std::vector<float> output(kOutput), lse(Layer::kQueryHeads);
  {
    Step step = Must(client_.BeginStep(items, &selection_));
    MustBeOk(step.AttendBegin(0, layer.queries(), output, lse));
  }  // abandoned while it runs
  Step step = Must(client_.BeginStep(items, &selection_));
  sequence.reset();
  EXPECT_FALSE(step.Attend(0, layer.queries(), output, lse).ok());
  { const Client closing = std::move(client_); }
  Expect(step.Attend(0, layer.queries(), output, lse), PQC_FAILED_PRECONDITION, "client", "closed");
}

TEST_F(StepTest, ForksDecodeApartFromTheirParent) {
  const Layer layer(400, 15), other(400, 16);
  Sequence parent = Fill(layer, 300);
  MustBeOk(Decode(parent, layer, 300));  // on its way when the fork is made
  Sequence child = Must(parent.Fork());
  MustBeOk(Decode(child, other, 301));
  MustBeOk(Decode(parent, layer, 301));
  MustBeOk(child.Flush());
  MustBeOk(parent.Flush());
  ExpectRows(parent, layer, 0, 302);
  ExpectRows(child, layer, 0, 301);
  ExpectRows(child, other, 301, 302);
}

TEST_F(StepTest, TheDecoderAtRatioOneIsFullAttention) {
  constexpr uint64_t kPrompt = 300, kTokens = 420;
  const Layer layer(kTokens, 17);
  for (const uint64_t prompt : {uint64_t{0}, uint64_t{2}, kPrompt}) {
    SCOPED_TRACE(prompt);
    Sequence sequence = Must(cache_.CreateSequence());
    Decoder decoder = Must(Decoder::Open(sequence, selection_));
    for (uint32_t number = 0; prompt > 0 && number < kLayers; ++number) {
      MustBeOk(decoder.Prefill(number, layer.keys(0, prompt), layer.values(0, prompt)));
    }
    const auto token = [](const float* numbers, uint32_t dim) {
      return Tensor(std::span(numbers, Layer::kKvHeads * dim), {Layer::kKvHeads, dim});
    };
    for (uint64_t position = prompt; position < kTokens; ++position) {
      std::vector<float> output(kOutput);
      for (uint32_t number = 0; number < kLayers; ++number) {
        MustBeOk(decoder.Decode(number, layer.queries(),
                                token(layer.key(position, 0), Layer::kKeyDim),
                                token(layer.value(position, 0), Layer::kValueDim), output));
      }
      if (position % 7 != 0 && position > prompt + 2) continue;
      const Attention full = layer.Attend({Layer::kKvHeads, Range(0, position + 1)});
      for (size_t i = 0; i < kOutput; ++i) {
        ASSERT_NEAR(output[i], full.output[i], 1e-4f) << "position " << position;
      }
    }
    std::vector<float> output(kOutput);
    Expect(decoder.Decode(1, layer.queries(), token(layer.key(0, 0), Layer::kKeyDim),
                          token(layer.value(0, 0), Layer::kValueDim), output),
           PQC_INVALID_ARGUMENT, "layer");
    MustBeOk(sequence.Flush());
    ExpectRows(sequence, layer, 0, kTokens);
  }
}

}  // namespace
}  // namespace pqcached

// Complete attention of decode steps on the local path: rows that are not stored yet, arguments
// that are refused, and steps that fail.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <utility>

#include "client/step/decode.h"
#include "tests/client/decode_case.h"
#include "tests/client/step/step_fixture.h"

namespace pqcached {
namespace {

using testing::DecodeArguments;
using testing::DecodeItem;
using testing::DecodeLayer;
using testing::Expect;
using testing::ExpectAttention;
using testing::ExpectFullStep;
using testing::FillModel;
using testing::FullAttention;
using testing::ItemsOf;
using testing::kSink;
using testing::kWindow;
using testing::Layer;
using testing::MakeModel;
using testing::Model;
using testing::Must;
using testing::MustBeOk;
using testing::Range;
using testing::SpecOf;
using testing::StepTest;

class DecodeTest : public StepTest {
 protected:
  void TearDown() override { sidecar_.OpenGate(); }  // also after a failure

  // One layer of a step at a position, which is then abandoned.
  Attention Once(Sequence& sequence, const Model& model, uint64_t position) {
    const std::vector<DecodeItem> batch = {{&sequence, &model, position}};
    Step step = Must(client_.BeginStep(ItemsOf(batch), &selection_));
    Attention attention;
    MustBeOk(DecodeLayer(step, 1, DecodeArguments(batch, 1), &attention));
    return attention;
  }

  Status DecodeWith(Step& step, const DecodeArguments& from, const Selection* selection) {
    Attention attention;
    return DecodeLayer(step, 0, from, &attention, selection);
  }
};

// The model's tokens up to `position`, and then those of `other`.
Model Joined(const Model& model, const Model& other, uint64_t position) {
  Model joined = model;
  for (size_t number = 0; number < joined.size(); ++number) {
    const Layer& from = other[number];
    auto* keys = const_cast<float*>(joined[number].key(position, 0));
    std::copy(from.key(position, 0), from.key(from.tokens() - 1, 0), keys);
    auto* values = const_cast<float*>(joined[number].value(position, 0));
    std::copy(from.value(position, 0), from.value(from.tokens() - 1, 0), values);
  }
  return joined;
}

std::vector<LayerRows> RowsOfModel(const Model& model, uint64_t begin, uint64_t end) {
  std::vector<LayerRows> rows;
  for (uint32_t layer = 0; layer < model.size(); ++layer) {
    rows.push_back({layer, model[layer].keys(begin, end), model[layer].values(begin, end)});
  }
  return rows;
}

TEST_F(DecodeTest, RowsThatAreNotStoredAreAttendedTo) {
  const Model model = MakeModel(340, 1), other = MakeModel(340, 7);
  Sequence first = FillModel(cache_, model, 300, kSink),
           second = FillModel(cache_, other, 300, kSink);
  sidecar_.CloseGate();
  for (uint64_t position = 300; position < 314 && !HasFatalFailure(); ++position) {
    ExpectFullStep(client_, {{&first, &model, position}, {&second, &other, position}}, selection_);
  }
  sidecar_.OpenGate();
  MustBeOk(first.Flush());
  MustBeOk(second.Flush());
  for (uint64_t position = 314; position < 330 && !HasFatalFailure(); ++position) {
    ExpectFullStep(client_, {{&first, &model, position}, {&second, &other, position}}, selection_);
  }
}

// The prompt itself came by steps; no row of the sink is stored.
TEST_F(DecodeTest, ASinkThatIsNotStoredIsAttendedTo) {
  const Model model = MakeModel(40, 1);
  Sequence sequence = Must(cache_.CreateSequence());
  sidecar_.CloseGate();
  for (uint64_t position = 0; position < 18 && !HasFatalFailure(); position += 3) {
    ExpectFullStep(client_, {{&sequence, &model, position, 3}}, selection_, /*with_step=*/false);
  }
  sidecar_.OpenGate();
  MustBeOk(sequence.Flush());
  EXPECT_EQ(Must(sequence.Describe()).token_count, 18u);
}

// A step on a GPU copies only what its device does not read in the pool.
TEST_F(DecodeTest, RowsBelowAFloorAreNotCopied) {
  const Model model = MakeModel(340, 1);
  Sequence sequence = FillModel(cache_, model, 300, kSink);
  sidecar_.CloseGate();
  ExpectFullStep(client_, {{&sequence, &model, 300, 5}}, selection_);
  ExpectFullStep(client_, {{&sequence, &model, 305, 2}}, selection_);
  pqc_step_item item = PQC_INIT(pqc_step_item);
  item.sequence = sequence.get();
  item.query_position = 307;
  pqc_step* step = nullptr;
  MustBeOk(Status(pqc_step_begin(client_.get(), &item, 1, nullptr, &step)));
  for (const uint64_t floor : {0u, 300u, 301u, 304u, 305u, 306u, 307u}) {
    step->decode.unstored.assign(1, {});
    step->decode.unstored_rows.clear();
    ASSERT_EQ(client::CopyUnstoredOf(*step, 0, floor), PQC_OK);
    const uint64_t begin = std::max<uint64_t>(floor, 300), tokens = 307 - begin;
    EXPECT_EQ(step->decode.unstored[0].begin, begin);
    constexpr size_t kRow = Layer::kKeyDim + Layer::kValueDim;
    std::vector<float> right;  // [layers, kv_heads, tokens, row]
    for (uint32_t layer = 0; layer < 2; ++layer) {
      for (uint32_t head = 0; head < Layer::kKvHeads; ++head) {
        for (uint64_t token = begin; token < 307; ++token) {
          const float* key = model[layer].key(token, head);
          const float* value = model[layer].value(token, head);
          right.insert(right.end(), key, key + Layer::kKeyDim);
          right.insert(right.end(), value, value + Layer::kValueDim);
        }
      }
    }
    ASSERT_EQ(right.size(), 2 * Layer::kKvHeads * tokens * kRow);
    const std::vector<std::byte>& rows = step->decode.unstored_rows;
    ASSERT_EQ(rows.size(), right.size() * sizeof(float));
    EXPECT_TRUE(rows.empty() || std::memcmp(rows.data(), right.data(), rows.size()) == 0) << floor;
  }
  pqc_step_abandon(step);
}

// Tokens are replaced while neither they nor the roll-back have reached the sidecar.
TEST_F(DecodeTest, RollBacksThatAreNotSentCount) {
  const Model model = MakeModel(360, 1), other = Joined(model, MakeModel(360, 9), 304),
              third = Joined(other, MakeModel(360, 13), 298);
  Sequence sequence = FillModel(cache_, model, 300, kSink);
  sidecar_.CloseGate();
  ExpectFullStep(client_, {{&sequence, &model, 300, 8}}, selection_);
  ExpectFullStep(client_, {{&sequence, &other, 304, 3}}, selection_);             // 4 are replaced
  ExpectFullStep(client_, {{&sequence, &other, 307, 2}}, selection_, true, {0});  // none remains
  ExpectFullStep(client_, {{&sequence, &other, 307, 1}}, selection_);
  ExpectFullStep(client_, {{&sequence, &third, 298, 4}}, selection_, true, {2});  // stored ones too
  ExpectFullStep(client_, {{&sequence, &third, 300, 5}}, selection_);
  ExpectFullStep(client_, {{&sequence, &third, 305, 1}}, selection_);
  sidecar_.OpenGate();
  MustBeOk(sequence.Flush());
  ExpectFullStep(client_, {{&sequence, &third, 306, 8}}, selection_);
  MustBeOk(sequence.Flush());
  EXPECT_EQ(Must(sequence.Describe()).token_count, 314u);
}

// Results do not depend on how far the sender is.
TEST_F(DecodeTest, RowsCountAsRoundedLikeStoredOnes) {
  for (const pqc_dtype dtype : {PQC_F16, PQC_BF16}) {
    SCOPED_TRACE(dtype);
    Cache cache = Must(client_.OpenCache(SpecOf(dtype == PQC_F16 ? "f16" : "bf16", {0, 1}, dtype)));
    const Model model = MakeModel(340, 1);
    Sequence sequence = FillModel(cache, model, 300, kSink);
    sidecar_.CloseGate();
    for (uint64_t position = 300; position < 312; ++position) {
      const std::vector<DecodeItem> batch = {{&sequence, &model, position}};
      Step step = Must(client_.BeginStep(ItemsOf(batch), &selection_));
      for (uint32_t layer = 0; layer < 2; ++layer) {
        Attention attention;
        MustBeOk(DecodeLayer(step, layer, DecodeArguments(batch, layer), &attention));
      }
      MustBeOk(step.End());
    }
    const Attention early = Once(sequence, model, 312);
    sidecar_.OpenGate();
    MustBeOk(sequence.Flush());
    ExpectAttention(early, Once(sequence, model, 312), 1e-5f);
  }
}

TEST_F(DecodeTest, LayersMayHaveRowsOfDifferentSizes) {
  CacheSpec spec = SpecOf("mixed", {0});
  spec.groups = {testing::GroupOf({0, 3}, PQC_BF16), testing::GroupOf({1}, PQC_F32),
                 testing::GroupOf({2}, PQC_F16)};
  Cache cache = Must(client_.OpenCache(spec));
  const Model model = MakeModel(340, 1, 4);
  Sequence first = FillModel(cache, model, 300, kSink),
           second = FillModel(cache, model, 280, kSink);
  sidecar_.CloseGate();
  for (uint32_t number = 0; number < 7; ++number) {
    const std::vector<DecodeItem> batch = {{&first, &model, 300 + number},
                                           {&second, &model, 280 + 2 * number, 2}};
    Step step = Must(client_.BeginStep(ItemsOf(batch), &selection_));
    for (const uint32_t layer : {2u, 0u, 3u, 1u}) {
      const DecodeArguments from(batch, layer);
      Attention attention;
      MustBeOk(DecodeLayer(step, layer, from, &attention));
      ExpectAttention(attention, FullAttention(batch, from, layer), layer == 1 ? 1e-4f : 2e-2f);
    }
    MustBeOk(step.End());
  }
  sidecar_.OpenGate();
}

// The prompt is on its way, and has no index yet: steps go on with all candidates.
TEST_F(DecodeTest, APromptOnItsWayIsAttendedTo) {
  const Model model = MakeModel(340, 1);
  Sequence sequence = Must(cache_.CreateSequence());
  sidecar_.CloseGate();
  const auto enqueue = [&](uint64_t begin, uint64_t end) {
    MustBeOk(sequence.EnqueueRows(begin, RowsOfModel(model, begin, end)));
  };
  enqueue(0, 9);
  enqueue(9, 14);
  for (uint64_t position = 14; position < 17; ++position) {
    ExpectFullStep(client_, {{&sequence, &model, position}}, selection_, /*with_step=*/false);
  }
  enqueue(17, 300);
  sidecar_.OpenGate();
  for (uint64_t position = 300; position < 320 && !HasFatalFailure(); ++position) {
    const std::vector<DecodeItem> batch = {{&sequence, &model, position}};
    const Selection few = {.sink_tokens = kSink, .window_tokens = kWindow, .ratio = 0.2};
    Step step = Must(client_.BeginStep(ItemsOf(batch), &few, 0, PQC_STEP_EXACT_UNTIL_INDEXED));
    for (uint32_t layer = 0; layer < 2; ++layer) {
      const DecodeArguments from(batch, layer);
      Attention attention;
      MustBeOk(DecodeLayer(step, layer, from, &attention));
      ExpectAttention(attention, FullAttention(batch, from, layer));
    }
    MustBeOk(step.End());
  }
}

// A call that ran out of time is repeated, while its first rows are still on their way.
TEST_F(DecodeTest, RowsThatAreEnqueuedAgainAreAttendedToOnce) {
  const Model model = MakeModel(60, 1);
  Sequence sequence = Must(cache_.CreateSequence());
  sidecar_.CloseGate();
  for (const auto& [begin, end] : {std::pair<uint64_t, uint64_t>{0, 9}, {9, 14}, {0, 9}, {9, 12}}) {
    MustBeOk(sequence.EnqueueRows(begin, RowsOfModel(model, begin, end)));
  }
  EXPECT_EQ(Must(sequence.Progress()).passed_tokens, 14u);
  for (uint64_t position = 14; position < 17; ++position) {
    ExpectFullStep(client_, {{&sequence, &model, position}}, selection_, /*with_step=*/false);
  }
}

// A step that does not wait says that the candidates are missing, and decodes once they are stored.
TEST_F(DecodeTest, StepsThatDoNotWaitDecode) {
  const Model model = MakeModel(340, 1);
  Sequence sequence = FillModel(cache_, model, 300, kSink);
  Once(sequence, model, 300);  // acquires the lease
  for (uint64_t position = 300; position < 310; ++position) {
    const std::vector<DecodeItem> batch = {{&sequence, &model, position}};
    Step step = Must(client_.BeginStep(ItemsOf(batch), &selection_, 0, PQC_STEP_NO_WAIT));
    sidecar_.CloseGate();
    for (uint32_t layer = 0; layer < 2; ++layer) {
      const DecodeArguments from(batch, layer);
      Attention attention;
      const Selection narrow = {.sink_tokens = kSink, .window_tokens = 1, .ratio = 1.0};
      MustBeOk(DecodeLayer(step, layer, from, &attention, position == 300 ? &narrow : nullptr));
      ExpectAttention(attention, FullAttention(batch, from, layer));
    }
    MustBeOk(step.End());
  }
  // The newest tokens are not stored, and this window has not all of them.
  const std::vector<DecodeItem> batch = {{&sequence, &model, 310}};
  Step step = Must(client_.BeginStep(ItemsOf(batch), &selection_, 0, PQC_STEP_NO_WAIT));
  const Selection narrow = {.sink_tokens = kSink, .window_tokens = 4, .ratio = 1.0};
  const DecodeArguments from(batch, 0);
  Attention attention;
  EXPECT_EQ(DecodeLayer(step, 0, from, &attention, &narrow).code(), PQC_DEADLINE_EXCEEDED);
  sidecar_.OpenGate();
  while (Must(sequence.Progress()).stored_tokens < 310) {
  }
  MustBeOk(DecodeLayer(step, 0, from, &attention, &narrow));  // the call itself is repeated
  ExpectAttention(attention, FullAttention(batch, from, 0));
}

// With a budget: the selected tokens of pqc_step_topk, sink and window, each token once.
TEST_F(DecodeTest, SelectedTokensAreThoseOfTheSelection) {
  const Model model = MakeModel(330, 1);
  Sequence sequence = FillModel(cache_, model, 310, kSink);
  const pqc_token_range excluded[] = {{2, 6}, {100, 120}, {300, 302}};
  for (const bool excludes : {false, true}) {
    SCOPED_TRACE(excludes);
    Selection selection = {.sink_tokens = kSink, .window_tokens = kWindow, .ratio = 0.3};
    if (excludes) selection.excluded.assign(std::begin(excluded), std::end(excluded));
    const StepItem items[] = {{&sequence, 310}};
    Step step = Must(client_.BeginStep(items, &selection));
    const Layer& layer = model[0];
    const Tensor query = layer.queries();
    std::vector<std::vector<uint32_t>> tokens;
    const Step::Positions best = Must(step.TopK(0, query));
    ASSERT_GT(best.counts[0], 0u);
    for (uint32_t head = 0; head < Layer::kKvHeads; ++head) {
      const auto* begin = best.positions.data() + size_t{head} * best.counts[0];
      tokens.emplace_back(begin, begin + best.counts[0]);
      for (const uint32_t token : Range(0, 311)) {
        bool skip = token >= kSink && token < 311 - kWindow;
        for (const pqc_token_range& range : excluded) {
          skip |= excludes && range.begin <= token && token < range.end;
        }
        if (!skip) tokens.back().push_back(token);
      }
    }
    std::vector<float> output(testing::kOutput), lse(Layer::kQueryHeads);
    MustBeOk(step.Decode(0, query, layer.keys(310, 311), layer.values(310, 311), output, lse));
    ExpectAttention({output, lse}, layer.Attend(tokens));
  }
}

TEST_F(DecodeTest, ATokenWithoutAnyOtherAttendsToNothing) {
  const Model model = MakeModel(40, 1);
  Sequence sequence = FillModel(cache_, model, 6, kSink);
  const Selection selection = {
      .sink_tokens = kSink, .window_tokens = kWindow, .excluded = {{0, 20}}, .ratio = 1.0};
  const std::vector<DecodeItem> batch = {{&sequence, &model, 6, 2}};
  Step step = Must(client_.BeginStep(ItemsOf(batch), nullptr));
  Attention attention;
  MustBeOk(DecodeLayer(step, 0, DecodeArguments(batch, 0), &attention, &selection));
  for (const float value : attention.output) ASSERT_EQ(value, 0.0f);
  for (const float value : attention.lse) ASSERT_EQ(value, -INFINITY);
}

TEST_F(DecodeTest, AnLseIsOptional) {
  const Model model = MakeModel(330, 1);
  Sequence sequence = FillModel(cache_, model, 300, kSink);
  const std::vector<DecodeItem> batch = {{&sequence, &model, 300}};
  const DecodeArguments from(batch, 0);
  Step step = Must(client_.BeginStep(ItemsOf(batch), &selection_));
  Attention attention = FullAttention(batch, from, 0);
  const Attention full = attention;
  attention.output.assign(attention.output.size(), NAN);
  MustBeOk(step.Decode(0, from.query_tensor(), from.key_tensor(), from.value_tensor(),
                       attention.output));
  ExpectAttention(attention, full);
}

TEST_F(DecodeTest, EveryLayerHasItsRowsOnce) {
  const Model model = MakeModel(330, 1);
  Sequence sequence = FillModel(cache_, model, 300, kSink);
  const std::vector<DecodeItem> batch = {{&sequence, &model, 300, 2}};
  const auto rows = [&](uint32_t layer) {
    return LayerRows{layer, model[layer].keys(300, 302), model[layer].values(300, 302)};
  };
  const auto decoded = [&] {
    Step step = Must(client_.BeginStep(ItemsOf(batch), &selection_));
    Attention attention;
    MustBeOk(DecodeLayer(step, 1, DecodeArguments(batch, 1), &attention));
    return step;
  };
  Expect(decoded().End(), PQC_INVALID_ARGUMENT, "layers", "layer 0 is missing");
  Expect(decoded().End({{rows(0), rows(1)}}), PQC_INVALID_ARGUMENT, "layers[1].layer",
         "1 was decoded");
  Expect(decoded().End({{rows(0), rows(0)}}), PQC_INVALID_ARGUMENT, "layers[1].layer",
         "listed twice");
  Step step = decoded();
  Attention attention;
  Expect(DecodeLayer(step, 1, DecodeArguments(batch, 1), &attention), PQC_INVALID_ARGUMENT, "layer",
         "1 was decoded");
  MustBeOk(step.End({{rows(0)}}));  // the other layer as in any step
  MustBeOk(sequence.Flush());
  EXPECT_EQ(Must(sequence.Describe()).token_count, 302u);
  ExpectFullStep(client_, {{&sequence, &model, 302, 3}}, selection_);
  for (uint32_t layer = 0; layer < 2; ++layer) {
    MustBeOk(sequence.Flush());
    std::vector<float> values(Layer::kKvHeads * 5 * Layer::kValueDim);
    MustBeOk(sequence.FetchBlocks(layer, {300, 305}, PQC_VALUE,
                                  std::as_writable_bytes(std::span(values))));
    for (uint64_t token = 300; token < 305; ++token) {
      for (uint32_t head = 0; head < Layer::kKvHeads; ++head) {
        ASSERT_EQ(std::memcmp(&values[(head * 5 + token - 300) * Layer::kValueDim],
                              model[layer].value(token, head), Layer::kValueDim * sizeof(float)),
                  0);
      }
    }
  }
}

TEST_F(DecodeTest, BadArgumentsAreNamedAndKeepNothing) {
  const Model model = MakeModel(330, 1);
  Sequence sequence = FillModel(cache_, model, 300, kSink);
  const std::vector<DecodeItem> batch = {{&sequence, &model, 300, 2}};
  const DecodeArguments good(batch, 0);
  Step step = Must(client_.BeginStep(ItemsOf(batch), &selection_));
  Attention attention;
  attention.output.resize(2 * testing::kOutput);
  const auto decode = [&](const Tensor& queries, const Tensor& keys, const Tensor& values) {
    return step.Decode(0, queries, keys, values, attention.output);
  };
  const Tensor queries = good.query_tensor(), keys = good.key_tensor(),
               values = good.value_tensor();
  Expect(decode(keys, keys, values), PQC_INVALID_ARGUMENT, "queries.shape");
  Expect(decode(queries, values, values), PQC_INVALID_ARGUMENT, "keys.shape[2]");
  Expect(decode(queries, keys, keys), PQC_INVALID_ARGUMENT, "values.shape[2]");
  Expect(decode(queries, model[0].keys(300, 303), model[0].values(300, 303)), PQC_INVALID_ARGUMENT,
         "keys.shape[0]", "3 tokens, but the step has 2");
  DecodeArguments bad = good;
  bad.values.back() = NAN;
  Expect(decode(queries, keys, bad.value_tensor()), PQC_INVALID_ARGUMENT, "values",
         "query token 1");
  bad.keys.front() = INFINITY;
  Expect(decode(queries, bad.key_tensor(), values), PQC_INVALID_ARGUMENT, "keys", "query token 0");
  bad.queries.back() = NAN;
  Expect(decode(bad.query_tensor(), keys, values), PQC_INVALID_ARGUMENT, "items[0].queries");
  Expect(step.Decode(7, queries, keys, values, attention.output), PQC_INVALID_ARGUMENT, "layer");
  Expect(step.Decode(0, queries, keys, values, std::span(attention.output).first(5)),
         PQC_OUT_OF_RANGE, "out.output_capacity");
  const Selection no_window = {.sink_tokens = kSink, .window_tokens = 0, .ratio = 1.0};
  Expect(DecodeWith(step, good, &no_window), PQC_INVALID_ARGUMENT, "selection.window_tokens");
  // The same for items that select nothing.
  const Selection no_ratio = {.sink_tokens = 1000, .window_tokens = 1, .ratio = 2.0};
  Expect(DecodeWith(step, good, &no_ratio), PQC_INVALID_ARGUMENT, "items[0].selection.ratio");
  const Selection all_sink = {.sink_tokens = 1000, .window_tokens = 1, .ratio = 0.1};
  Expect(DecodeLayer(step, 0, bad, &attention, &all_sink), PQC_INVALID_ARGUMENT, "keys");
  bad.keys = good.keys;
  bad.values = good.values;
  Expect(DecodeLayer(step, 0, bad, &attention, &all_sink), PQC_INVALID_ARGUMENT, "items[0].queries",
         "kv head 1");

  for (uint32_t layer = 0; layer < 2; ++layer) {  // nothing of all this has been kept
    const DecodeArguments from(batch, layer);
    MustBeOk(DecodeLayer(step, layer, from, &attention));
    ExpectAttention(attention, FullAttention(batch, from, layer));
  }
  MustBeOk(step.End());
}

TEST_F(DecodeTest, AStepWhoseWorkerHasEndedFails) {
  const Model model = MakeModel(330, 1);
  Sequence sequence = FillModel(cache_, model, 300, kSink);
  const std::vector<DecodeItem> batch = {{&sequence, &model, 300}};
  const Selection all_own = {.sink_tokens = 1000, .window_tokens = kWindow, .ratio = 1.0};
  for (const Selection* selection : {&selection_, &all_own}) {
    Step step = Must(client_.BeginStep(ItemsOf(batch), nullptr));
    Attention attention;
    MustBeOk(DecodeLayer(step, 0, DecodeArguments(batch, 0), &attention, selection));
    sidecar_.EndWorker();
    Expect(DecodeLayer(step, 1, DecodeArguments(batch, 1), &attention, selection), PQC_UNAVAILABLE,
           "");
    sidecar_.StartWorker();
  }
}

// While the sidecar indexes segments behind the engine's back, and makes newer segment maps. It may
// do so just between an acknowledgement and its arrival, so that a few calls are no failure.
TEST_F(DecodeTest, StepsOverALiveIndexMakeNoCall) {
  const Model model = MakeModel(1300, 1);
  uint64_t calls = 0;
  for (int round = 0; round < 3; ++round) {
    SequenceOptions options;
    options.live_index = LiveIndex{.sink_tokens = kSink};
    Sequence sequence = Must(cache_.CreateSequence(options));
    for (uint32_t number = 0; number < 2; ++number) {
      MustBeOk(
          sequence.Ingest(number, 0, model[number].keys(0, 600), model[number].values(0, 600)));
    }
    uint64_t before = 0;
    for (uint64_t position = 600; position < 1300 && !HasFatalFailure(); ++position) {
      if (position == 601) before = sidecar_.calls;
      ExpectFullStep(client_, {{&sequence, &model, position}}, selection_);
      MustBeOk(sequence.Flush());
    }
    calls += sidecar_.calls - before;
  }
  EXPECT_LE(calls, 2u);
}

// Between the decode of its last layer and its end, too.
TEST_F(DecodeTest, AClosedClientIsNoHarmToAStep) {
  const Model model = MakeModel(330, 1);
  Sequence sequence = FillModel(cache_, model, 300, kSink);
  sidecar_.CloseGate();
  ExpectFullStep(client_, {{&sequence, &model, 300}}, selection_);
  const std::vector<DecodeItem> batch = {{&sequence, &model, 301}};
  Step step = Must(client_.BeginStep(ItemsOf(batch), &selection_));
  Attention attention;
  MustBeOk(DecodeLayer(step, 0, DecodeArguments(batch, 0), &attention));
  sidecar_.OpenGate();
  { const Client closed = std::move(client_); }
  Expect(DecodeLayer(step, 1, DecodeArguments(batch, 1), &attention), PQC_FAILED_PRECONDITION,
         "client");
  Expect(step.End(), PQC_FAILED_PRECONDITION, "client");
}

}  // namespace
}  // namespace pqcached

// Complete attention in steps on a GPU: rows in the sidecar's memory, rows that are not stored yet,
// and those of the step; layers of all kinds, launched and captured. One source for two programs:
// against the emulation of the device, and the real one.
#include <cmath>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "gpu/graph.h"
#include "gpu/steps.h"
#include "tests/client/decode_case.h"
#include "tests/client/gpu/gpu_wrapper_fixture.h"

namespace pqcached {
namespace {

using testing::Append;
using testing::DecodeArguments;
using testing::DecodeItem;
using testing::Expect;
using testing::ExpectAttention;
using testing::FillModel;
using testing::FullAttention;
using testing::GroupOf;
using testing::ItemsOf;
using testing::kSink;
using testing::kWindow;
using testing::Layer;
using testing::MakeModel;
using testing::Model;
using testing::Must;
using testing::MustBeOk;
using testing::Range;
using testing::SpanOf;
using testing::SpecOf;

constexpr uint64_t kLayerWindow = 24;  // of layers of kind window

class GpuDecodeTest : public testing::GpuWrapperTest {
 protected:
  GpuDecodeTest() { handle_->state->remote_version = client::kRemoteVersion; }
  void TearDown() override {
    sidecar_.OpenGate();  // also after a failure
    GpuWrapperTest::TearDown();
  }

  // The tensors of one layer's decode call.
  struct DecodeTensors : Tensors {
    explicit DecodeTensors(const DecodeArguments& from)
        : Tensors(from.queries), keys(from.keys), values(from.values) {}

    Tensor key() const {
      return Tensor(SpanOf(keys), {tokens, Layer::kKvHeads, Layer::kKeyDim}).OnGpu();
    }
    Tensor value() const {
      return Tensor(SpanOf(values), {tokens, Layer::kKvHeads, Layer::kValueDim}).OnGpu();
    }
    void Set(const DecodeArguments& from) {
      queries.Set(from.queries);
      keys.Set(from.keys);
      values.Set(from.values);
    }

    DeviceArray<float> keys, values;
  };

  Result<Step> Begin(const std::vector<DecodeItem>& batch, const Selection& selection,
                     uint64_t flags = 0, uint32_t timeout_ms = 0) {
    return gpu_->BeginStep(ItemsOf(batch), selection, stream_, timeout_ms,
                           PQC_STEP_DECODES | flags);
  }
  Status Decode(Step& step, uint32_t layer, const DecodeTensors& tensors,
                std::span<uint32_t> counts = {}) {
    return step.Decode(layer, tensors.query(), tensors.key(), tensors.value(),
                       SpanOf(tensors.output), SpanOf(tensors.lse), nullptr, counts);
  }

  // A step whose selection has all candidates: full attention in every layer. Ends without rows.
  void ExpectFullStep(const std::vector<DecodeItem>& batch, const Selection& selection,
                      const std::vector<uint32_t>& accepted = {}, float tolerance = 1e-4f) {
    Step step = Must(Begin(batch, selection));
    for (uint32_t layer = 0; layer < batch[0].model->size(); ++layer) {
      const DecodeArguments from(batch, layer);
      const DecodeTensors tensors(from);
      MustBeOk(Decode(step, layer, tensors));
      ExpectAttention(tensors.Get(stream_), FullAttention(batch, from, layer), tolerance);
      if (HasFatalFailure()) return;
    }
    MustBeOk(step.End({}, accepted));
  }

  // The attention of each query token to its own [begin, end) without the excluded tokens, where
  // `range_of` is given the token's position.
  template <class RangeOf>
  static Attention Exact(const std::vector<DecodeItem>& batch, const DecodeArguments& from,
                         uint32_t layer, const Selection& selection, const RangeOf& range_of) {
    Attention all;
    for (size_t i = 0; i < batch.size(); ++i) {
      for (uint32_t token = 0; token < batch[i].length; ++token) {
        std::vector<uint32_t> seen;
        for (const uint32_t position : range_of(batch[i].position, token)) {
          bool is_excluded = false;
          for (const auto& range : selection.excluded) {
            is_excluded = is_excluded || (position >= range.begin && position < range.end);
          }
          if (!is_excluded) seen.push_back(position);
        }
        for (uint32_t head = 0; head < Layer::kQueryHeads; ++head) {
          from.cases[i].AddTokens((*batch[i].model)[layer], token, head, seen, &all);
        }
      }
    }
    return all;
  }

  static std::vector<uint32_t> LayerWindow(uint64_t position, uint32_t token) {
    const uint64_t end = position + token + 1;
    return Range(end - std::min(end, kLayerWindow), end);
  }
  static std::vector<uint32_t> All(uint64_t position, uint32_t token) {
    return Range(0, position + token + 1);
  }

  const Selection everything_ = {.sink_tokens = kSink, .window_tokens = kWindow, .ratio = 1.0};
};

TEST_F(GpuDecodeTest, RowsThatAreNotStoredAreAttendedTo) {
  const Model model = MakeModel(360, 1), other = MakeModel(360, 7);
  Sequence first = FillModel(cache_, model, 300, kSink),
           second = FillModel(cache_, other, 280, kSink);
  sidecar_.CloseGate();
  for (uint64_t i = 0; i < 13 && !HasFatalFailure(); ++i) {
    ExpectFullStep({{&first, &model, 300 + i}, {&second, &other, 280 + i}}, everything_);
  }
  sidecar_.OpenGate();
  MustBeOk(first.Flush());
  MustBeOk(second.Flush());
  for (uint64_t i = 13; i < 28 && !HasFatalFailure(); i += 3) {
    ExpectFullStep({{&second, &other, 280 + i, 3}, {&first, &model, 300 + i, 3}}, everything_);
  }
  MustBeOk(first.Flush());
  EXPECT_EQ(Must(first.Describe()).token_count, 328u);
  ExpectFullStep({{&first, &model, 328}}, everything_);
}

// Tokens are replaced while neither they nor the roll-back have reached the sidecar.
TEST_F(GpuDecodeTest, RollBacksThatAreNotSentCount) {
  const Model model = MakeModel(360, 1), other = MakeModel(360, 9);
  Model joined = model;
  for (size_t layer = 0; layer < joined.size(); ++layer) {
    const Layer& from = other[layer];
    std::copy(from.key(301, 0), from.key(359, 0), const_cast<float*>(joined[layer].key(301, 0)));
    std::copy(from.value(301, 0), from.value(359, 0),
              const_cast<float*>(joined[layer].value(301, 0)));
  }
  Sequence sequence = FillModel(cache_, model, 310, kSink);
  ExpectFullStep({{&sequence, &model, 310, 3}}, everything_);
  MustBeOk(sequence.Flush());
  sidecar_.CloseGate();
  ExpectFullStep({{&sequence, &joined, 301, 3}}, everything_, {2});  // stored ones are replaced
  ExpectFullStep({{&sequence, &joined, 303, 2}}, everything_, {0});
  ExpectFullStep({{&sequence, &joined, 303, 3}}, everything_, {1});
  ExpectFullStep({{&sequence, &joined, 304, 1}}, everything_);
  sidecar_.OpenGate();
  MustBeOk(sequence.Flush());
  EXPECT_EQ(Must(sequence.Describe()).token_count, 305u);
  ExpectFullStep({{&sequence, &joined, 305, 3}}, everything_);
}

TEST_F(GpuDecodeTest, ShortContextsAreAttendedToInFull) {
  const Model model = MakeModel(60, 1);
  Selection count = everything_;
  count.ratio = 0;
  count.token_count = kSink + kWindow + 1;
  for (const Selection& selection : {everything_, count}) {
    for (uint64_t tokens = 1; tokens < kSink + kWindow + 4; tokens += 3) {
      Sequence sequence = FillModel(cache_, model, tokens, kSink);
      const bool has_candidates = tokens + 1 > kSink + kWindow;
      if (has_candidates && selection.ratio == 0) continue;  // one of two candidates
      ExpectFullStep({{&sequence, &model, tokens, 3}}, selection);
      ExpectFullStep({{&sequence, &model, tokens + 3}}, everything_);
      if (HasFatalFailure()) return;
    }
  }
}

TEST_F(GpuDecodeTest, RowsCountAsRoundedLikeStoredOnes) {
  for (const pqc_dtype dtype : {PQC_F16, PQC_BF16}) {
    gpu_.reset();
    cache_ = Must(client_.OpenCache(SpecOf(dtype == PQC_F16 ? "f16" : "bf16", {0, 1}, dtype)));
    Open(512);
    const Model model = MakeModel(340, 1);
    Sequence sequence = FillModel(cache_, model, 300, kSink);
    sidecar_.CloseGate();
    for (uint64_t position = 300; position < 308; position += 2) {
      ExpectFullStep({{&sequence, &model, position, 2}}, everything_, {}, 2e-2f);
    }
    const std::vector<DecodeItem> batch = {{&sequence, &model, 308}};
    const DecodeTensors early(DecodeArguments(batch, 1)), late(DecodeArguments(batch, 1));
    for (const DecodeTensors* tensors : {&early, &late}) {
      Step step = Must(Begin(batch, everything_));
      MustBeOk(Decode(step, 1, *tensors));
      sidecar_.OpenGate();
    }
    ExpectAttention(early.Get(stream_), late.Get(stream_), 1e-5f);
  }
}

// The selected tokens, by pqc_step_attend of the same step, and sink and window.
TEST_F(GpuDecodeTest, SelectedTokensAreMergedWithSinkAndWindow) {
  const Model model = MakeModel(420, 3), other = MakeModel(330, 20);
  Sequence first = FillModel(cache_, model, 380, kSink),
           second = FillModel(cache_, other, 290, kSink);
  const std::vector<DecodeItem> batch = {{&first, &model, 380, 3}, {&second, &other, 290, 3}};
  Selection some = {.sink_tokens = kSink, .window_tokens = kWindow, .ratio = 0.2};
  some.excluded = {{2, 3}, {100, 140}, {285, 289}, {374, 376}};
  const auto own = [](uint64_t position, uint32_t token) {
    std::vector<uint32_t> seen = Range(0, kSink);
    for (const uint32_t p : Range(position + 1 - kWindow, position + token + 1)) seen.push_back(p);
    return seen;
  };
  for (const uint64_t flags : {uint64_t{0}, uint64_t{PQC_STEP_SELECT_PER_TOKEN}}) {
    Step step = Must(Begin(batch, some, flags));
    for (uint32_t layer = 0; layer < 2; ++layer) {
      const DecodeArguments from(batch, layer);
      const DecodeTensors tensors(from);
      std::vector<uint32_t> counts(2), decoded_counts(2);
      MustBeOk(step.Attend(layer, tensors.query(), SpanOf(tensors.output), SpanOf(tensors.lse),
                           nullptr, counts));
      Attention right = tensors.Get(stream_);
      right.Merge(Exact(batch, from, layer, some, own));
      MustBeOk(Decode(step, layer, tensors, decoded_counts));
      ExpectAttention(tensors.Get(stream_), right);
      EXPECT_EQ(decoded_counts, counts);
      EXPECT_GT(counts[0], 20u);
      if (HasFatalFailure()) return;
    }
  }
}

TEST_F(GpuDecodeTest, LayersDecodeByTheirKindLaunchedAndCaptured) {
  const std::vector<pqc_layer_kind> kinds = {PQC_LAYERS_FULL, PQC_LAYERS_SELECTED,
                                             PQC_LAYERS_WINDOW, PQC_LAYERS_SELECTED};
  CacheSpec spec = SpecOf("decoded kinds", {});
  spec.groups.clear();
  for (uint32_t layer = 0; layer < kinds.size(); ++layer) {
    spec.groups.push_back(GroupOf({layer}, PQC_F32));
    spec.groups.back().kind = kinds[layer];
    if (kinds[layer] == PQC_LAYERS_WINDOW) spec.groups.back().window_tokens = kLayerWindow;
  }
  gpu_.reset();
  cache_ = Must(client_.OpenCache(spec));
  Open(400);
  const Model model = MakeModel(420, 3, 4), other = MakeModel(330, 20, 4);
  Selection excluding = everything_;
  excluding.excluded = {{1, 2}, {100, 110}, {372, 378}, {384, 386}};
  Sequence first = FillModel(cache_, model, 380, kSink),
           second = FillModel(cache_, other, 290, kSink);
  std::vector<std::unique_ptr<DecodeTensors>> tensors;
  gpu::Graph graph;
  for (uint32_t round = 0; round < 6; ++round) {
    std::vector<DecodeItem> batch = {{&first, &model, 380 + 2 * round, 2},
                                     {&second, &other, 290 + 2 * round, 2}};
    Step step = Must(Begin(batch, excluding));
    const bool captures = round == 3;
    if (round == 0) {
      for (uint32_t layer = 0; layer < 4; ++layer) {
        tensors.push_back(std::make_unique<DecodeTensors>(DecodeArguments(batch, layer)));
      }
    }
    if (captures) {
      ASSERT_TRUE(graph.Begin(stream_).ok());
    }
    for (uint32_t layer = 0; layer < 4; ++layer) {
      if (round < 3) tensors[layer]->Set(DecodeArguments(batch, layer));
      if (round <= 3) MustBeOk(Decode(step, layer, *tensors[layer]));
    }
    if (captures) {
      ASSERT_TRUE(graph.End().ok());
    }
    if (round >= 3) {
      for (uint32_t layer = 0; layer < 4; ++layer) {
        tensors[layer]->Set(DecodeArguments(batch, layer));
      }
      ASSERT_TRUE(graph.Launch(stream_).ok());
    }
    for (uint32_t layer = 0; layer < 4; ++layer) {
      SCOPED_TRACE(::testing::Message() << "layer " << layer << ", round " << round);
      const DecodeArguments from(batch, layer);
      ExpectAttention(tensors[layer]->Get(stream_),
                      Exact(batch, from, layer, excluding, layer == 2 ? LayerWindow : All));
    }
    MustBeOk(step.End());
    if (HasFatalFailure()) return;
  }
  // A graph packs the rows of the items that its step has, and of no others.
  const std::vector<DecodeItem> alone = {{&second, &other, 302, 2}};
  Step step = Must(Begin(alone, excluding));
  for (uint32_t layer = 0; layer < 4; ++layer) {
    const DecodeArguments from(std::vector<DecodeItem>{alone[0], {&first, &model, 392, 2}}, layer);
    tensors[layer]->Set(from);
  }
  ASSERT_TRUE(graph.Launch(stream_).ok());
  MustBeOk(step.End());
  MustBeOk(second.Flush());
  MustBeOk(first.Flush());
  EXPECT_EQ(Must(second.Describe()).token_count, 304u);
  EXPECT_EQ(Must(first.Describe()).token_count, 392u);
}

TEST_F(GpuDecodeTest, StepsWaitWhenManyRowsAreNotStored) {
  constexpr uint64_t kWide = 2 * gpu::kRecentCapacity;
  const Selection wide = {.sink_tokens = kSink, .window_tokens = kWide, .ratio = 1.0};
  const Model model = MakeModel(500, 1);
  Sequence sequence = FillModel(cache_, model, 300, kSink);
  sidecar_.CloseGate();
  for (uint64_t i = 0; i < gpu::kRecentCapacity && !HasFatalFailure(); i += 2) {
    ExpectFullStep({{&sequence, &model, 300 + i, 2}}, wide);
  }
  const std::vector<DecodeItem> next = {{&sequence, &model, 300 + gpu::kRecentCapacity}};
  ExpectFullStep({{&sequence, &model, 300 + gpu::kRecentCapacity}}, wide);
  const std::vector<DecodeItem> late = {{&sequence, &model, 301 + gpu::kRecentCapacity}};
  EXPECT_EQ(Begin(late, wide, 0, 20).status().code(), PQC_DEADLINE_EXCEEDED);
  sidecar_.OpenGate();
  ExpectFullStep(late, wide);
}

TEST_F(GpuDecodeTest, LseMayBeLeftOut) {
  const Model model = MakeModel(340, 1);
  Sequence sequence = FillModel(cache_, model, 300, kSink);
  const std::vector<DecodeItem> batch = {{&sequence, &model, 300, 2}};
  Step step = Must(Begin(batch, everything_));
  const DecodeArguments from(batch, 0);
  const DecodeTensors tensors(from);
  MustBeOk(step.Decode(0, tensors.query(), tensors.key(), tensors.value(), SpanOf(tensors.output),
                       std::span<float>()));
  Attention found = tensors.Get(stream_), right = FullAttention(batch, from, 0);
  found.lse = right.lse;
  ExpectAttention(found, right);
}

TEST_F(GpuDecodeTest, WhatIsWrongIsRefusedByName) {
  const Model model = MakeModel(340, 1);
  Sequence sequence = FillModel(cache_, model, 300, kSink);
  const std::vector<DecodeItem> batch = {{&sequence, &model, 300}};
  const DecodeArguments from(batch, 0);
  const DecodeTensors tensors(from);
  {
    Step step = Must(gpu_->BeginStep(ItemsOf(batch), everything_, stream_));
    Expect(Decode(step, 0, tensors), PQC_FAILED_PRECONDITION, "step", "PQC_STEP_DECODES");
  }
  Selection wrong = everything_;
  wrong.window_tokens = 0;
  Expect(Begin(batch, wrong).status(), PQC_INVALID_ARGUMENT, "options.selection.window_tokens",
         "at least 1");
  pqc_step_item item = PQC_INIT(pqc_step_item);
  item.sequence = sequence.get();
  item.query_position = 300;
  pqc_step_options options = PQC_INIT(pqc_step_options);
  options.flags = PQC_STEP_DECODES;
  pqc_step* none = nullptr;
  Expect(Status(pqc_gpu_step_begin(gpu_pointer_, &item, 1, &options, stream_, &none)),
         PQC_INVALID_ARGUMENT, "options.selection", "must not be NULL");
  Step step = Must(Begin(batch, everything_));
  Expect(step.Decode(0, tensors.query(), tensors.key(), tensors.value(), SpanOf(tensors.output),
                     SpanOf(tensors.lse), &everything_),
         PQC_UNIMPLEMENTED, "selection", "must be NULL on a GPU");
  Expect(step.Decode(0, tensors.query(), from.key_tensor(), tensors.value(), SpanOf(tensors.output),
                     SpanOf(tensors.lse)),
         PQC_INVALID_ARGUMENT, "keys.device");
  MustBeOk(Decode(step, 0, tensors));
  Expect(Decode(step, 0, tensors), PQC_INVALID_ARGUMENT, "layer", "decoded in this step already");
  Expect(step.End(), PQC_INVALID_ARGUMENT, "layers", "layer 1 is missing");
  step = Must(Begin(batch, everything_));
  MustBeOk(Decode(step, 0, tensors));
  Expect(step.End(Rows(model[0], 300, 301)), PQC_INVALID_ARGUMENT, "layers[0].layer",
         "0 was decoded in this step");
  // A window of more than selected_capacity.
  Open(kSink + kWindow - 1);
  Expect(Begin(batch, {.sink_tokens = kSink, .window_tokens = kWindow, .ratio = 0.08}).status(),
         PQC_INVALID_ARGUMENT, "options.selection.window_tokens", "20 tokens");
}

// The rows of decoded layers and of listed ones, on the device and on the host.
TEST_F(GpuDecodeTest, OtherLayersAreListed) {
  const Model model = MakeModel(340, 1);
  Sequence sequence = FillModel(cache_, model, 300, kSink);
  for (uint64_t position = 300; position < 304; ++position) {
    const std::vector<DecodeItem> batch = {{&sequence, &model, position}};
    const DecodeTensors decoded(DecodeArguments(batch, 1)), listed(DecodeArguments(batch, 0));
    Step step = Must(Begin(batch, everything_));
    MustBeOk(Decode(step, 1, decoded));
    const DecodeArguments host(batch, 0);
    const bool on_device = position % 2 == 0;
    const LayerRows rows[] = {{0, on_device ? listed.key() : host.key_tensor(),
                               on_device ? listed.value() : host.value_tensor()}};
    MustBeOk(step.End(rows));
  }
  ExpectFullStep({{&sequence, &model, 304}}, everything_);
}

TEST_F(GpuDecodeTest, NumbersThatAreNotFiniteEndTheStep) {
  gpu_.reset();
  cache_ = Must(client_.OpenCache(SpecOf("f16", {0, 1}, PQC_F16)));
  Open(512);
  const Model model = MakeModel(340, 1);
  Sequence sequence = FillModel(cache_, model, 300, kSink);
  const std::vector<DecodeItem> batch = {{&sequence, &model, 300, 2}};
  const auto run = [&](bool is_key, size_t element, float number) {
    Step step = Must(Begin(batch, everything_));
    for (uint32_t layer = 0; layer < 2; ++layer) {
      DecodeArguments from(batch, layer);
      if (layer == 1) (is_key ? from.keys : from.values)[element] = number;
      const DecodeTensors tensors(from);
      MustBeOk(Decode(step, layer, tensors));
      EXPECT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
    }
    return step.End();
  };
  constexpr size_t kKeyRow = Layer::kKvHeads * Layer::kKeyDim;
  Expect(run(true, kKeyRow - 1, NAN), PQC_INVALID_ARGUMENT, "keys", "query token 0 of layer 1");
  Expect(run(true, kKeyRow, 1e5f), PQC_INVALID_ARGUMENT, "keys", "query token 1 of layer 1");
  Expect(run(false, 0, -std::numeric_limits<float>::infinity()), PQC_INVALID_ARGUMENT, "values",
         "query token 0 of layer 1");
  ExpectFullStep({{&sequence, &model, 300, 2}}, everything_, {}, 2e-2f);
}

}  // namespace
}  // namespace pqcached

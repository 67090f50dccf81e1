// Steps on a GPU over layers of all kinds: selected, full and window. One source for two programs: against the emulation
// of the device, and the real one.
#include <algorithm>
#include <iterator>
#include <memory>
#include <string>
#include <vector>

#include "gpu/graph.h"
#include "kernels/select/pq.h"
#include "tests/client/decode_case.h"
#include "tests/client/gpu/gpu_wrapper_fixture.h"

namespace pqcached {
namespace {

using testing::Append;
using testing::DecodeArguments;
using testing::DecodeItem;
using testing::Expect;
using testing::ExpectAttention;
using testing::GroupOf;
using testing::ItemsOf;
using testing::kSink;
using testing::kWindow;
using testing::Layer;
using testing::MakeModel;
using testing::Model;
using testing::Must;
using testing::MustBeOk;
using testing::SpanOf;

// Layers with an index lie between layers without one.
constexpr uint32_t kWindowLayer = 2;
constexpr uint32_t kSelected[] = {1, 3, 4};
constexpr uint32_t kLayerCount = 6;
constexpr size_t kQueryFloats = Layer::kQueryHeads * Layer::kKeyDim;
// Codes of two layers of the default index: two sequences.
constexpr kernels::PqGeometry kGeometry = {Layer::kKeyDim, 4, 8};
const uint64_t kTwoLayers =
    uint64_t{2} * 2 * Layer::kKvHeads * kernels::PlaneCount(kGeometry) * kernels::PlaneStride(2048);

class GpuKindsTest : public testing::GpuWrapperTest {
 protected:
  static CacheSpec Spec(const std::vector<pqc_layer_kind>& kinds) {
    CacheSpec spec = testing::SpecOf("kinds" + std::to_string(kinds.size()), {});
    spec.groups.clear();
    for (uint32_t layer = 0; layer < kinds.size(); ++layer) {
      spec.groups.push_back(GroupOf({layer}, PQC_F32));
      spec.groups.back().kind = kinds[layer];
      if (kinds[layer] == PQC_LAYERS_WINDOW) spec.groups.back().window_tokens = 24;
    }
    return spec;
  }

  GpuKindsTest() { handle_->state->remote_version = client::kRemoteVersion; }

  void OpenKinds(const std::vector<pqc_layer_kind>& kinds, uint64_t selected_capacity,
                 uint64_t codes_bytes = 0) {
    gpu_.reset();
    cache_ = Must(client_.OpenCache(Spec(kinds)));
    Open(selected_capacity, codes_bytes);
  }

  Status Attend(Step& step, uint32_t layer, const Tensors& tensors,
                std::vector<uint32_t>* counts = nullptr) {
    return step.Attend(layer, tensors.query(), SpanOf(tensors.output), SpanOf(tensors.lse), nullptr,
                       counts ? std::span<uint32_t>(*counts) : std::span<uint32_t>());
  }

  // The attention of each item over [begin, its window), or over nothing.
  static Attention Exact(const std::vector<DecodeItem>& batch, const DecodeArguments& from,
                         uint32_t layer, uint64_t begin, bool is_empty = false) {
    Attention all;
    for (size_t i = 0; i < batch.size(); ++i) {
      const uint64_t end = is_empty ? begin : batch[i].position + 1 - kWindow;
      Append(from.cases[i].Expected((*batch[i].model)[layer], {begin, end}), &all);
    }
    return all;
  }

  static std::vector<LayerRows> RowsOfStep(const std::vector<DecodeItem>& batch,
                                           std::vector<DecodeArguments>* held) {
    std::vector<LayerRows> rows;
    for (uint32_t layer = 0; layer < batch[0].model->size(); ++layer) {
      held->emplace_back(batch, layer);
    }
    for (uint32_t layer = 0; layer < held->size(); ++layer) {
      rows.push_back({layer, (*held)[layer].key_tensor(), (*held)[layer].value_tensor()});
    }
    return rows;
  }

  const std::vector<pqc_layer_kind> all_ = {PQC_LAYERS_FULL,     PQC_LAYERS_SELECTED,
                                            PQC_LAYERS_WINDOW,   PQC_LAYERS_SELECTED,
                                            PQC_LAYERS_SELECTED, PQC_LAYERS_FULL};
  const Selection everything_ = {.sink_tokens = kSink, .window_tokens = kWindow, .ratio = 1.0};
};

TEST_F(GpuKindsTest, LayersAttendByTheirKindLaunchedAndCaptured) {
  const Model model = MakeModel(420, 3, kLayerCount), other = MakeModel(330, 20, kLayerCount);
  // Codes of all layers on the device, and of each layer with an index one layer ahead.
  for (const uint64_t codes_bytes : {uint64_t{0}, kTwoLayers}) {
    OpenKinds(all_, 400, codes_bytes);
    Sequence first = testing::FillModel(cache_, model, 380, kSink);
    Sequence second = testing::FillModel(cache_, other, 290, kSink);
    std::vector<std::unique_ptr<Tensors>> tensors;
    for (uint32_t layer = 0; layer < kLayerCount; ++layer) {
      tensors.push_back(std::make_unique<Tensors>(std::vector<float>(4 * kQueryFloats)));
    }
    gpu::Graph graph;
    for (uint32_t round = 0; round < 6; ++round) {
      const std::vector<DecodeItem> batch = {{&first, &model, 380 + 2 * round, 2},
                                             {&second, &other, 290 + 2 * round, 2}};
      const std::vector<StepItem> items = ItemsOf(batch);
      Step step = Must(gpu_->BeginStep(items, everything_, stream_));
      for (uint32_t layer = 0; layer < kLayerCount; ++layer) {
        tensors[layer]->queries.Set(DecodeArguments(batch, layer).queries);
      }
      const bool captures = round == 3;
      if (captures) {
        ASSERT_TRUE(graph.Begin(stream_).ok());
      }
      for (uint32_t layer = 0; layer < kLayerCount && round <= 3; ++layer) {
        std::vector<uint32_t> counts(2, 12345);
        MustBeOk(Attend(step, layer, *tensors[layer], &counts));
        for (uint32_t i = 0; i < 2; ++i) {
          const uint64_t between = batch[i].position + 1 - kWindow - kSink;
          EXPECT_EQ(counts[i], layer == kWindowLayer ? 0 : between) << "layer " << layer;
        }
      }
      if (captures) {
        ASSERT_TRUE(graph.End().ok());
      }
      if (round >= 3) {
        ASSERT_TRUE(graph.Launch(stream_).ok());
      }
      for (uint32_t layer = 0; layer < kLayerCount; ++layer) {
        SCOPED_TRACE(::testing::Message() << "layer " << layer << ", round " << round);
        ExpectAttention(tensors[layer]->Get(stream_), Exact(batch, DecodeArguments(batch, layer),
                                                            layer, kSink, layer == kWindowLayer));
      }
      std::vector<DecodeArguments> held;
      MustBeOk(step.End(RowsOfStep(batch, &held)));
      if (HasFatalFailure()) return;
    }
    EXPECT_EQ(Must(gpu_->Count()).resident_layers, codes_bytes == 0 ? 3u : 0u);
  }
}

// With codes on the device, and copied one layer ahead; but for a token whose value rounds otherwise.
TEST_F(GpuKindsTest, LayersWithAnIndexSelectAsOnTheCpu) {
  const Model model = MakeModel(420, 3, kLayerCount);
  const Selection some = {.sink_tokens = kSink, .window_tokens = kWindow, .ratio = 0.2};
  const DeviceArray<uint32_t> positions(Layer::kKvHeads * 400), counts(Layer::kKvHeads);
  for (const uint64_t codes_bytes : {uint64_t{0}, kTwoLayers}) {
    OpenKinds(all_, 400, codes_bytes);
    Sequence sequence = testing::FillModel(cache_, model, 380, kSink);
    const StepItem items[] = {{&sequence, 380, 1}};
    Step step = Must(gpu_->BeginStep(items, some, stream_));
    for (const uint32_t layer : kSelected) {
      const testing::RangeCase query(1, 380, layer);
      const Tensors tensors(query.queries);
      MustBeOk(Gpu::TopK(step, layer, tensors.query(), SpanOf(positions), 400, SpanOf(counts)));
      ASSERT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
      const Selected right = Must(sequence.TopK(query.query(layer), some));
      ASSERT_GT(right.count, 20u);
      for (uint32_t head = 0; head < Layer::kKvHeads; ++head) {
        ASSERT_EQ(counts.Get()[head], right.count);
        const std::vector<uint32_t> all = positions.Get();
        const auto found = all.begin() + head * 400;
        const auto first = right.positions.begin() + static_cast<ptrdiff_t>(head * right.count);
        const auto count = static_cast<ptrdiff_t>(right.count);
        std::vector<uint32_t> common;
        std::set_intersection(found, found + count, first, first + count,
                              std::back_inserter(common));
        EXPECT_GE(common.size() + 1, right.count) << "layer " << layer;
      }
    }
  }
}

// Codes that do not stay on the device are copied for pages, too.
TEST_F(GpuKindsTest, LayersWithAnIndexSelectPagesAsOnTheCpu) {
  const Model model = MakeModel(420, 3, kLayerCount);
  const Selection some = {.sink_tokens = kSink, .window_tokens = kWindow, .ratio = 0.3};
  const PageOptions options{.page_tokens = 16, .heads = PQC_HEADS_SUM};
  for (const uint64_t codes_bytes : {uint64_t{0}, kTwoLayers}) {
    OpenKinds(all_, 400, codes_bytes);
    Sequence sequence = testing::FillModel(cache_, model, 380, kSink);
    const StepItem items[] = {{&sequence, 380, 1}};
    std::vector<std::vector<int32_t>> right;
    {
      Step step = Must(client_.BeginStep(items, &some));
      for (const uint32_t layer : kSelected) {
        const testing::RangeCase query(1, 380, layer);
        right.push_back(Must(step.TopKPages(layer, query.query().queries, options)).pages);
      }
    }
    Step step = Must(gpu_->BeginStep(items, some, stream_));
    for (size_t i = 0; i < right.size(); ++i) {
      const Tensors tensors(testing::RangeCase(1, 380, kSelected[i]).queries);
      const DeviceArray<int32_t> pages(right[i].size());
      const DeviceArray<uint32_t> lengths(1);
      Must(Gpu::TopKPages(step, kSelected[i], tensors.query(), options, SpanOf(pages),
                          static_cast<uint32_t>(pages.size()), SpanOf(lengths)));
      ASSERT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
      std::vector<int32_t> common;
      const std::vector<int32_t> found = pages.Get();
      std::set_intersection(found.begin(), found.end(), right[i].begin(), right[i].end(),
                            std::back_inserter(common));
      EXPECT_GE(common.size() + 1, right[i].size()) << "layer " << kSelected[i];
    }
  }
}

TEST_F(GpuKindsTest, CachesNeedNoLayerWithAnIndex) {
  const Model model = MakeModel(400, 3, 2);
  OpenKinds({PQC_LAYERS_FULL, PQC_LAYERS_WINDOW}, 100);
  Sequence sequence = Must(cache_.CreateSequence());
  for (uint32_t layer = 0; layer < 2; ++layer) {
    MustBeOk(sequence.Ingest(layer, 0, model[layer].keys(0, 380), model[layer].values(0, 380)));
  }
  const std::vector<DecodeItem> batch = {{&sequence, &model, 380, 3}};
  const std::vector<StepItem> items = ItemsOf(batch);
  const DeviceArray<int32_t> list(std::vector<int32_t>{9, 7, 350});
  const DeviceArray<pqc_token_range> ranges(std::vector<pqc_token_range>{{10, 350}});
  Selection excluding = everything_;
  excluding.excluded = {{100, 110}, {200, 340}};
  Step step = Must(gpu_->BeginStep(items, excluding, stream_));
  for (uint32_t layer = 0; layer < 2; ++layer) {
    const DecodeArguments from(batch, layer);
    const Tensors tensors(from.queries);
    MustBeOk(step.AttendPositions(layer, tensors.query(), {.positions = SpanOf(list)},
                                  SpanOf(tensors.output), SpanOf(tensors.lse)));
    Attention right;
    for (uint32_t token = 0; token < 3; ++token) {
      for (uint32_t head = 0; head < Layer::kQueryHeads; ++head) {
        from.cases[0].AddTokens(model[layer], token, head, {7, 9, 350}, &right);
      }
    }
    ExpectAttention(tensors.Get(stream_), right);
    MustBeOk(step.AttendRange(layer, tensors.query(), {ranges.data(), 1}, SpanOf(tensors.output),
                              SpanOf(tensors.lse)));
    ExpectAttention(tensors.Get(stream_), from.cases[0].Expected(model[layer], {10, 350}));
    // Without the excluded tokens, in four parts.
    MustBeOk(Attend(step, layer, tensors));
    Attention expected = Exact(batch, from, layer, kSink, true);
    for (const pqc_token_range& range :
         {pqc_token_range{kSink, 100}, {110, 200}, {340, 381 - kWindow}}) {
      if (layer == 0) expected.Merge(from.cases[0].Expected(model[layer], range));
    }
    ExpectAttention(tensors.Get(stream_), expected);
    const DeviceArray<uint32_t> positions(Layer::kKvHeads * 100), counts(Layer::kKvHeads);
    Expect(Gpu::TopK(step, layer, tensors.query(), SpanOf(positions), 100, SpanOf(counts)),
           PQC_UNIMPLEMENTED, "layer", "has no index");
    const DeviceArray<int32_t> pages(Layer::kKvHeads * 100);
    Expect(Gpu::TopKPages(step, layer, tensors.query(), {}, SpanOf(pages), 100, SpanOf(counts))
               .status(),
           PQC_UNIMPLEMENTED, "layer", "has no index");
  }
  std::vector<DecodeArguments> held;
  MustBeOk(step.End(RowsOfStep(batch, &held)));
}

}  // namespace
}  // namespace pqcached

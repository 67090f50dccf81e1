// Steps of the C ABI on a GPU: an engine that passes device pointers and a stream gets what it gets on the CPU. One source
// for two programs: against the emulation of the device, and the real one.
#include "pqcached/gpu.hpp"

#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <iterator>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "client/gpu/gpu.h"
#include "tests/client/step/step_fixture.h"
#include "tests/gpu/device_array.h"
#if defined(PQCACHED_CUDA_EMULATION)
#include "tests/gpu/emulation/emulation.h"
#include "tests/skip.h"
#endif

extern "C" const pqcached::gpu::GpuEntry* pqcached_gpu_entry();

namespace pqcached {
namespace {

using testing::kOutput;
using testing::kSink;
using testing::kWindow;
using testing::Layer;
using testing::MustBeOk;
using testing::StepTest;

// One default, whichever way an engine asks for it.
static_assert(pqc_gpu_options{}.policy == PQC_GPU_FREQUENCY);
static_assert(gpu::StepsOptions{}.policy == kernels::cuda::CachePolicy::kFrequencyAdmission);

constexpr uint32_t kQueryFloats = Layer::kQueryHeads * Layer::kKeyDim;

struct GpuCloser {
  void operator()(pqc_gpu* gpu) const { pqc_gpu_close(gpu); }
};
using Gpu = std::unique_ptr<pqc_gpu, GpuCloser>;
struct CacheCloser {
  void operator()(pqc_cache* cache) const { pqc_cache_close(cache); }
};

void ExpectOk(pqc_status status) { ASSERT_EQ(status, PQC_OK) << pqc_last_error(); }

void ExpectFails(pqc_status status, pqc_status expected, const std::string& part) {
  EXPECT_EQ(status, expected) << pqc_last_error();
  EXPECT_NE(std::string(pqc_last_error()).find(part), std::string::npos) << pqc_last_error();
}

// A tensor of f32 that begins at `data`, [tokens, heads, dim].
struct Shaped {
  Shaped(const float* data, pqc_device device, uint64_t tokens, uint64_t heads, uint64_t dim)
      : shape{tokens, heads, dim} {
    tensor.ptr = const_cast<float*>(data);
    tensor.device = device;
    tensor.dtype = PQC_F32;
    tensor.ndim = 3;
    tensor.shape = shape;
  }
  Shaped(const Shaped&) = delete;
  Shaped& operator=(const Shaped&) = delete;

  uint64_t shape[3];
  pqc_tensor tensor = PQC_INIT(pqc_tensor);
};

class GpuStepTest : public StepTest {
 protected:
  void SetUp() override {
    const std::string why = WhyNoDevice();
    if (!why.empty()) PQC_SKIP("gpu") << "no GPU: " << why;
    ASSERT_EQ(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), cudaSuccess);
    pqc_cache* cache = nullptr;
    const uint32_t layers[] = {0, 1};
    pqc_layer_group group = PQC_INIT(pqc_layer_group);
    group.kind = PQC_LAYERS_SELECTED;
    group.layers = layers;
    group.layer_count = kLayers;
    group.kv_heads = Layer::kKvHeads;
    group.query_heads = Layer::kQueryHeads;
    group.key_dim = Layer::kKeyDim;
    group.value_dim = Layer::kValueDim;
    group.dtype = PQC_F32;
    pqc_cache_spec spec = PQC_INIT(pqc_cache_spec);
    const CacheSpec opened = testing::SpecOf("cache", {0, 1});
    spec.name = opened.name.c_str();
    spec.model_fingerprint = opened.model_fingerprint.c_str();
    spec.groups = &group;
    spec.group_count = 1;
    spec.capacity_bytes = opened.capacity_bytes;
    ExpectOk(pqc_cache_open(handle_, &spec, &cache));
    cache_handle_.reset(cache);
  }

  void TearDown() override {
    gpu_.reset();
    if (stream_ != nullptr) {
      EXPECT_EQ(cudaStreamDestroy(stream_), cudaSuccess);
    }
#if defined(PQCACHED_CUDA_EMULATION)
    emulation::Reset();
#endif
  }

  static pqc_gpu_options Options() {
    pqc_gpu_options options = PQC_INIT(pqc_gpu_options);
    options.sequence_capacity = 2;
    options.token_capacity = 2048;
    options.selected_capacity = 512;
    options.query_length = 2;
    options.codebook_capacity = 6;
    options.cache_tokens = 256;
    return options;
  }

  pqc_status Open(const pqc_gpu_options& options) {
    pqc_gpu* gpu = nullptr;
    // A path is for the loader; without one it is the library's code in this program.
    const pqc_status status = client::Call([&] {
      return client::OpenGpu(cache_handle_.get(), &options,
                             options.gpu_library_path ? nullptr : pqcached_gpu_entry(), &gpu);
    });
    gpu_.reset(gpu);
    return status;
  }

  struct Item {
    Sequence* sequence;
    const Layer* layer;
    uint64_t position;
  };

  pqc_status Begin(const std::vector<Item>& items, uint32_t length, double ratio, pqc_step** step) {
    std::vector<pqc_step_item> c_items(items.size(), PQC_INIT(pqc_step_item));
    for (size_t i = 0; i < items.size(); ++i) {
      c_items[i].sequence = items[i].sequence->get();
      c_items[i].query_position = items[i].position;
      c_items[i].query_length = length;
    }
    pqc_selection selection = PQC_INIT(pqc_selection);
    selection.sink_tokens = kSink;
    selection.window_tokens = kWindow;
    selection.budget = PQC_BUDGET_RATIO;
    selection.ratio = ratio;
    pqc_step_options options = PQC_INIT(pqc_step_options);
    options.selection = &selection;
    return pqc_gpu_step_begin(gpu_.get(), c_items.data(), static_cast<uint32_t>(items.size()),
                              &options, stream_, step);
  }

  // The queries of each item, `length` times.
  static std::vector<float> Queries(const std::vector<Item>& items, uint32_t length) {
    std::vector<float> queries;
    for (const Item& item : items) {
      const auto* numbers = static_cast<const float*>(item.layer->queries().c().ptr);
      for (uint32_t i = 0; i < length; ++i) {
        queries.insert(queries.end(), numbers, numbers + kQueryFloats);
      }
    }
    return queries;
  }

  struct Results {
    std::vector<float> output, lse;
    std::vector<uint32_t> positions, counts;  // [items, kv_heads, kStride], [items, kv_heads]
  };
  static constexpr uint64_t kStride = 512;

  // Select and attend of one layer, with the engine's own tensors on the device.
  struct Engine {
    Engine(const std::vector<Item>& items, uint32_t length)
        : tokens(items.size() * length),
          queries(Queries(items, length)),
          output(tokens * kOutput),
          lse(tokens * Layer::kQueryHeads),
          positions(items.size() * Layer::kKvHeads * kStride),
          counts(items.size() * Layer::kKvHeads) {}

    pqc_status Run(pqc_step* step, uint32_t layer) {
      const Shaped shaped(queries.data(), PQC_CUDA, tokens, Layer::kQueryHeads, Layer::kKeyDim);
      pqc_gpu_positions selected = PQC_INIT(pqc_gpu_positions);
      selected.positions = positions.data();
      selected.stride = kStride;
      selected.counts = counts.data();
      const pqc_status status = pqc_gpu_step_topk(step, layer, &shaped.tensor, &selected);
      if (status != PQC_OK) return status;
      pqc_step_attention out = PQC_INIT(pqc_step_attention);
      out.output = output.data();
      out.output_capacity = output.size();
      out.lse = lse.data();
      out.lse_capacity = lse.size();
      return pqc_step_attend(step, layer, &shaped.tensor, nullptr, &out);
    }
    Results Get() const { return {output.Get(), lse.Get(), positions.Get(), counts.Get()}; }

    uint64_t tokens;
    DeviceArray<float> queries, output, lse;
    DeviceArray<uint32_t> positions, counts;
  };

  // The attention over what was selected is right, and what was selected is what the CPU selects, but for a token
  // whose value rounds otherwise.
  void Check(const std::vector<Item>& items, uint32_t length, double ratio, uint32_t layer,
             const Results& results) {
    for (size_t i = 0; i < items.size(); ++i) {
      const Selection selection = {.sink_tokens = kSink, .window_tokens = kWindow, .ratio = ratio};
      const std::vector<float> queries = Queries({items[i]}, length);
      const Selected expected = testing::Must(items[i].sequence->TopK(
          {.layer = layer,
           .query_position = items[i].position,
           .queries = {queries, {length, Layer::kQueryHeads, Layer::kKeyDim}}},
          selection));
      ASSERT_GT(expected.count, 0u);
      std::vector<std::vector<uint32_t>> chosen(Layer::kKvHeads);
      for (uint32_t head = 0; head < Layer::kKvHeads; ++head) {
        const size_t lane = i * Layer::kKvHeads + head;
        ASSERT_EQ(results.counts[lane], expected.count);
        const auto begin = results.positions.begin() + static_cast<ptrdiff_t>(lane * kStride);
        chosen[head].assign(begin, begin + expected.count);
        std::vector<uint32_t> common;
        const auto first = expected.positions.begin() + head * expected.count;
        std::set_intersection(chosen[head].begin(), chosen[head].end(), first,
                              first + expected.count, std::back_inserter(common));
        EXPECT_GE(common.size() + 1, expected.count) << "head " << head;
      }
      const Attention right = items[i].layer->Attend(chosen);
      for (uint32_t token = 0; token < length; ++token) {
        const size_t at = i * length + token;
        for (size_t j = 0; j < kOutput; ++j) {
          ASSERT_NEAR(results.output[at * kOutput + j], right.output[j], 1e-4f) << i << " " << j;
        }
        for (uint32_t j = 0; j < Layer::kQueryHeads; ++j) {
          ASSERT_NEAR(results.lse[at * Layer::kQueryHeads + j], right.lse[j], 1e-4f);
        }
      }
    }
  }

  // Ends with rows [position, position + length) of each item's layer, on the device or not.
  pqc_status End(pqc_step* step, const std::vector<Item>& items, uint32_t length, bool on_device,
                 const uint32_t* accepted = nullptr, const Layer* rows = nullptr) {
    std::vector<float> keys, values;
    for (const Item& item : items) {
      const Layer& layer = rows ? *rows : *item.layer;
      const float* k = layer.key(item.position, 0);
      const float* v = layer.value(item.position, 0);
      keys.insert(keys.end(), k, k + length * Layer::kKvHeads * Layer::kKeyDim);
      values.insert(values.end(), v, v + length * Layer::kKvHeads * Layer::kValueDim);
    }
    const uint64_t tokens = items.size() * length;
    const DeviceArray<float> device_keys(keys), device_values(values);
    const pqc_device device = on_device ? PQC_CUDA : PQC_CPU;
    const Shaped k(on_device ? device_keys.data() : keys.data(), device, tokens, Layer::kKvHeads,
                   Layer::kKeyDim);
    const Shaped v(on_device ? device_values.data() : values.data(), device, tokens,
                   Layer::kKvHeads, Layer::kValueDim);
    std::vector<pqc_layer_rows> layers(kLayers, PQC_INIT(pqc_layer_rows));
    for (uint32_t layer = 0; layer < kLayers; ++layer) {
      layers[layer].layer = layer;
      layers[layer].keys = k.tensor;
      layers[layer].values = v.tensor;
    }
    return pqc_step_end(step, layers.data(), kLayers, accepted);
  }

  // A whole step, checked.
  void Decode(const std::vector<Item>& items, uint32_t length, bool on_device,
              const uint32_t* accepted = nullptr, const Layer* rows = nullptr) {
    constexpr double kRatio = 0.2;
    pqc_step* step = nullptr;
    ExpectOk(Begin(items, length, kRatio, &step));
    ASSERT_NE(step, nullptr);
    Engine engine(items, length);
    std::vector<Results> results;
    for (uint32_t layer = 0; layer < kLayers; ++layer) {
      ExpectOk(engine.Run(step, layer));
      ASSERT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
      results.push_back(engine.Get());
    }
    for (uint32_t layer = 0; layer < kLayers; ++layer) {
      Check(items, length, kRatio, layer, results[layer]);
    }
    ExpectOk(End(step, items, length, on_device, accepted, rows));
  }

  pqc_gpu_counts Counts() {
    pqc_gpu_counts counts = PQC_INIT(pqc_gpu_counts);
    ExpectOk(pqc_gpu_count(gpu_.get(), &counts));
    return counts;
  }

  std::unique_ptr<pqc_cache, CacheCloser> cache_handle_;
  cudaStream_t stream_ = nullptr;
  Gpu gpu_;
};

TEST_F(GpuStepTest, ABatchThatGrowsIsAttendedAsOnTheCpuAndItsRowsArrive) {
  ExpectOk(Open(Options()));
  const Layer layers[] = {Layer(1000, 1), Layer(500, 2)};
  Sequence sequences[] = {Fill(layers[0], 800), Fill(layers[1], 300)};
  for (uint64_t i = 0; i < 20; ++i) {
    Decode({{&sequences[0], &layers[0], 800 + i}, {&sequences[1], &layers[1], 300 + i}}, 1,
           /*on_device=*/i % 2 == 0);
    if (HasFatalFailure()) return;
  }
  for (int i = 0; i < 2; ++i) MustBeOk(sequences[i].Flush());
  ExpectRows(sequences[0], layers[0], 0, 820);
  ExpectRows(sequences[1], layers[1], 0, 320);
  const pqc_gpu_counts counts = Counts();
  EXPECT_GT(counts.hits, 0u);
  EXPECT_GT(counts.loaded, 0u);
  EXPECT_GT(counts.misses, 0u);
  EXPECT_GT(counts.device_bytes, 0u);
}

TEST_F(GpuStepTest, SpeculationIsForgottenOnTheDeviceWhenItIsRolledBack) {
  ExpectOk(Open(Options()));
  const Layer layer(700, 3), wrong(700, 4);
  Sequence sequence = Fill(layer, 400);
  // Wrong rows come in, become candidates, perhaps lie in the block cache; then they are taken back.
  const uint32_t none[] = {0};
  for (uint64_t round = 0; round < 2; ++round) {
    const uint64_t begin = 400 + round * 20;
    for (uint64_t i = 0; i < 20; i += 2) {
      Decode({{&sequence, &layer, begin + i}}, 2, i % 4 == 0);
      if (HasFatalFailure()) return;
    }
    Decode({{&sequence, &layer, begin + 20}}, 2, false, none, &wrong);
    if (HasFatalFailure()) return;
  }
  MustBeOk(sequence.Flush());
  ExpectRows(sequence, layer, 0, 440);
}

TEST_F(GpuStepTest, MoreSequencesThanSeatsTakeTurns) {
  ExpectOk(Open(Options()));
  std::vector<Layer> layers;
  std::vector<Sequence> sequences;
  for (uint32_t i = 0; i < 3; ++i) layers.emplace_back(600, 10 + i);
  for (uint32_t i = 0; i < 3; ++i) sequences.push_back(Fill(layers[i], 400));
  for (uint64_t i = 0; i < 6; ++i) {
    const uint64_t first = i % 3, second = (i + 1) % 3;
    // Each sequence is in two of three steps.
    const auto at = [&](uint64_t which) {
      uint64_t steps = 0;
      for (uint64_t j = 0; j < i; ++j) steps += j % 3 == which || (j + 1) % 3 == which ? 1 : 0;
      return 400 + steps;
    };
    Decode({{&sequences[first], &layers[first], at(first)},
            {&sequences[second], &layers[second], at(second)}},
           1, false);
    if (HasFatalFailure()) return;
  }
}

TEST_F(GpuStepTest, ACapturedStepServesLaterOnes) {
  ExpectOk(Open(Options()));
  const Layer layer(900, 5);
  Sequence sequence = Fill(layer, 600);
  Decode({{&sequence, &layer, 600}}, 1, false);
  const std::vector<Item> first = {{&sequence, &layer, 601}};
  Engine engine(first, 1);
  pqc_step* step = nullptr;
  ExpectOk(Begin(first, 1, 0.2, &step));
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t exec = nullptr;
  ASSERT_EQ(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal), cudaSuccess);
  ExpectOk(engine.Run(step, 1));
  ASSERT_EQ(cudaStreamEndCapture(stream_, &graph), cudaSuccess);
  ASSERT_EQ(cudaGraphInstantiate(&exec, graph, 0), cudaSuccess);
  for (uint64_t position = 601; position < 622; ++position) {
    const std::vector<Item> items = {{&sequence, &layer, position}};
    if (position > 601) ExpectOk(Begin(items, 1, 0.2, &step));
    ASSERT_EQ(cudaGraphLaunch(exec, stream_), cudaSuccess);
    ASSERT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
    Check(items, 1, 0.2, 1, engine.Get());
    if (HasFatalFailure()) return;
    ExpectOk(End(step, items, 1, false));
  }
  EXPECT_GT(Counts().hits, 0u);
  EXPECT_EQ(cudaGraphExecDestroy(exec), cudaSuccess);
  EXPECT_EQ(cudaGraphDestroy(graph), cudaSuccess);
}

TEST_F(GpuStepTest, PrefillFromTheDeviceArrivesBeforeAndAfterAWorkerEnds) {
  ExpectOk(Open(Options()));
  const Layer layer(701, 9);
  const DeviceArray<float> keys(std::vector<float>(layer.key(0, 0), layer.key(700, 0)));
  const DeviceArray<float> values(std::vector<float>(layer.value(0, 0), layer.value(700, 0)));
  Sequence sequence = testing::Must(cache_.CreateSequence());
  const auto ingest = [&](uint64_t begin, uint64_t end) {
    for (uint32_t number = 0; number < kLayers; ++number) {
      const Shaped k(keys.data() + begin * Layer::kKvHeads * Layer::kKeyDim, PQC_CUDA, end - begin,
                     Layer::kKvHeads, Layer::kKeyDim);
      const Shaped v(values.data() + begin * Layer::kKvHeads * Layer::kValueDim, PQC_CUDA,
                     end - begin, Layer::kKvHeads, Layer::kValueDim);
      ExpectOk(
          pqc_gpu_ingest(gpu_.get(), sequence.get(), number, begin, &k.tensor, &v.tensor, stream_));
    }
  };
  ingest(0, 100);
  ingest(100, 250);
  MustBeOk(sequence.Flush());
  ExpectRows(sequence, layer, 0, 250);
  sidecar_.EndWorker();
  sidecar_.StartWorker();
  ingest(250, 600);  // through the ring of another worker
  MustBeOk(sequence.BuildIndex({.iterations = 3, .seed = 1, .sink_tokens = kSink}));
  ExpectRows(sequence, layer, 0, 600);
  Decode({{&sequence, &layer, 600}}, 1, true);
}

TEST_F(GpuStepTest, TheCppWrapperPrefillsSelectsAndAttends) {
  ExpectOk(Open(Options()));
  pqcached::Gpu gpu = pqcached::Gpu::Adopt(gpu_.release());
  const Layer layer(401, 10);
  const DeviceArray<float> keys(std::vector<float>(layer.key(0, 0), layer.key(400, 0)));
  const DeviceArray<float> values(std::vector<float>(layer.value(0, 0), layer.value(400, 0)));
  Sequence sequence = testing::Must(cache_.CreateSequence());
  for (uint32_t number = 0; number < kLayers; ++number) {
    MustBeOk(gpu.Ingest(
        sequence, number, 0,
        Tensor({keys.data(), keys.size()}, {400, Layer::kKvHeads, Layer::kKeyDim}).OnGpu(),
        Tensor({values.data(), values.size()}, {400, Layer::kKvHeads, Layer::kValueDim}).OnGpu(),
        stream_));
  }
  MustBeOk(sequence.BuildIndex({.iterations = 3, .seed = 1, .sink_tokens = kSink}));
  const std::vector<Item> items = {{&sequence, &layer, 400}};
  Engine engine(items, 1);
  const StepItem step_items[] = {{&sequence, 400, 1}};
  {
    Step step = testing::Must(gpu.BeginStep(
        step_items, {.sink_tokens = kSink, .window_tokens = kWindow, .ratio = 0.2}, stream_));
    const Tensor queries = Tensor({engine.queries.data(), engine.queries.size()},
                                  {1, Layer::kQueryHeads, Layer::kKeyDim})
                               .OnGpu();
    MustBeOk(pqcached::Gpu::TopK(step, 1, queries,
                                 {engine.positions.data(), engine.positions.size()}, kStride,
                                 {engine.counts.data(), engine.counts.size()}));
    MustBeOk(step.Attend(1, queries, {engine.output.data(), engine.output.size()},
                         {engine.lse.data(), engine.lse.size()}));
    ASSERT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
    MustBeOk(step.End(Rows(layer, 400, 401)));
  }
  Check(items, 1, 0.2, 1, engine.Get());
  EXPECT_GT(testing::Must(gpu.Count()).device_bytes, 0u);
  EXPECT_EQ(pqcached::Gpu::Open(cache_, {.token_capacity = 0}).status().code(),
            PQC_INVALID_ARGUMENT);
}

TEST_F(GpuStepTest, WhatDoesNotFitIsRefusedByName) {
  const auto refuse = [&](auto set, pqc_status status, const char* part) {
    pqc_gpu_options options = Options();
    set(options);
    ExpectFails(Open(options), status, part);
  };
  refuse([](auto& to) { to.gpu_library_path = "/nonexistent/libpqcached_gpu.so"; },
         PQC_FAILED_PRECONDITION, "no device support: libpqcached_gpu.so");
  refuse([](auto& to) { to.device = 99; }, PQC_INVALID_ARGUMENT, "device 99 of ");
  refuse([](auto& to) { to.token_capacity = 0; }, PQC_INVALID_ARGUMENT, "token_capacity");
  refuse([](auto& to) { to.query_length = 9; }, PQC_INVALID_ARGUMENT, "query_length");
  refuse([](auto& to) { to.max_block_loads = 129; }, PQC_INVALID_ARGUMENT, "max_block_loads");
  refuse([](auto& to) { to.segment_capacity = (1 << 22) + 1; }, PQC_INVALID_ARGUMENT,
         "segment_capacity");
  refuse([](auto& to) { to.index.kind = PQC_INDEX_FLAT; }, PQC_UNIMPLEMENTED, "options.index");
  refuse(
      [](auto& to) {
        to.index = PQC_INIT(pqc_index);
        to.index.kind = PQC_INDEX_PQ;
        to.index.subspaces = 4;
        to.index.bits = 8;
        to.index.reserved[PQC_INDEX_LAYOUT] = PQC_SUBSPACES_WEIGHTED;
      },
      PQC_UNIMPLEMENTED, "options.index.layout");
  pqc_gpu_options options = Options();
  options.token_capacity = 350;
  options.selected_capacity = 40;
  ExpectOk(Open(options));

  const Layer layer(600, 6);
  Sequence sequence = Fill(layer, 500);
  pqc_step* step = nullptr;
  const std::vector<Item> items = {{&sequence, &layer, 500}};
  ExpectFails(Begin(items, 1, 0.2, &step), PQC_INVALID_ARGUMENT, "selected_capacity is 40");
  ExpectFails(Begin(items, 1, 0.1, &step), PQC_INVALID_ARGUMENT, "token_capacity is 350");
  Sequence fits = Fill(layer, 300);
  const std::vector<Item> short_items = {{&fits, &layer, 300}};
  ExpectOk(Begin(short_items, 1, 0.15, &step));
  pqc_step* other = nullptr;
  const std::vector<Item> more = {{&sequence, &layer, 500}};
  ExpectFails(Begin(more, 1, 0.1, &other), PQC_ABORTED, "another step is in progress");

  Engine engine(short_items, 1);
  const std::vector<float> host = Queries(short_items, 1);
  const Shaped on_host(host.data(), PQC_CPU, 1, Layer::kQueryHeads, Layer::kKeyDim);
  pqc_step_attention out = PQC_INIT(pqc_step_attention);
  out.output = engine.output.data();
  out.output_capacity = engine.output.size();
  out.lse = engine.lse.data();
  out.lse_capacity = engine.lse.size();
  ExpectFails(pqc_step_attend(step, 0, &on_host.tensor, nullptr, &out), PQC_INVALID_ARGUMENT,
              "queries.device: must be PQC_CUDA");
  const Shaped mislabelled(host.data(), PQC_CUDA, 1, Layer::kQueryHeads, Layer::kKeyDim);
  ExpectFails(pqc_step_attend(step, 0, &mislabelled.tensor, nullptr, &out), PQC_INVALID_ARGUMENT,
              "queries is pageable host memory");
  ExpectFails(pqc_step_attend_begin(step, 0, &on_host.tensor, nullptr, &out), PQC_INVALID_ARGUMENT,
              "queries.device");
  ExpectFails(
      pqc_step_decode(step, 0, &on_host.tensor, &on_host.tensor, &on_host.tensor, nullptr, &out),
      PQC_FAILED_PRECONDITION, "PQC_STEP_DECODES");
  ExpectOk(engine.Run(step, 0));  // the step is as good as before
  pqc_step_abandon(step);
  ExpectOk(Begin(short_items, 1, 0.15, &step));
  pqc_step_abandon(step);
}

TEST_F(GpuStepTest, StepsRefuseWhatOnlyTheCpuDoes) {
  ExpectOk(Open(Options()));
  const Layer layer(700, 5);
  Sequence sequence = Fill(layer, 500);
  pqc_step_item item = PQC_INIT(pqc_step_item);
  item.sequence = sequence.get();
  item.query_position = 500;
  pqc_selection selection = PQC_INIT(pqc_selection);
  selection.window_tokens = kWindow;
  selection.ratio = 0.2;
  pqc_step_options options = PQC_INIT(pqc_step_options);
  options.selection = &selection;
  options.flags = PQC_STEP_EXACT_UNTIL_INDEXED;
  pqc_step* step = nullptr;
  ExpectFails(pqc_gpu_step_begin(gpu_.get(), &item, 1, &options, stream_, &step), PQC_UNIMPLEMENTED,
              "options.flags: PQC_STEP_EXACT_UNTIL_INDEXED");
  EXPECT_EQ(step, nullptr);
  options.flags = 0;
  selection.rerank_factor = 2.5;
  ExpectFails(pqc_gpu_step_begin(gpu_.get(), &item, 1, &options, stream_, &step), PQC_UNIMPLEMENTED,
              "options.selection.rerank_factor: 2.5, must be 0 or 1 in steps of a GPU");
  EXPECT_EQ(step, nullptr);
  selection.rerank_factor = 1;
  ExpectOk(pqc_gpu_step_begin(gpu_.get(), &item, 1, &options, stream_, &step));
  pqc_step_abandon(step);
}

#if defined(PQCACHED_CUDA_EMULATION)

TEST_F(GpuStepTest, RowsThatCannotBePageLockedAreBroughtByTheHost) {
  emulation::SetMachine({.registers_read_only = false});
  ExpectOk(Open(Options()));
  const Layer layer(700, 7);
  Sequence sequence = Fill(layer, 500);
  for (uint64_t i = 0; i < 4; ++i) {
    Decode({{&sequence, &layer, 500 + i}}, 1, true);
    if (HasFatalFailure()) return;
  }
  EXPECT_EQ(Counts().has_staged_rows, 1u);
  EXPECT_EQ(Counts().locked_bytes, 0u);
}

TEST_F(GpuStepTest, WhereLockingIsRefusedLaterGraphsHaveToBeCapturedAnew) {
  ExpectOk(Open(Options()));
  EXPECT_EQ(Counts().has_staged_rows, 0u);
  const uint64_t generation = Counts().generation;
  emulation::FailCall("cudaHostRegister", cudaErrorMemoryAllocation);
  const Layer layer(700, 8);
  Sequence sequence = Fill(layer, 500);
  Decode({{&sequence, &layer, 500}}, 1, true);
  EXPECT_EQ(Counts().has_staged_rows, 1u);
  EXPECT_GT(Counts().generation, generation);
}

TEST_F(GpuStepTest, NamesWhyThereIsNoDeviceAndWhatMemoryWasWanted) {
  emulation::SetMachine({.count_error = cudaErrorInsufficientDriver, .driver_version = 12020});
  ExpectFails(Open(Options()), PQC_FAILED_PRECONDITION,
              "no device support: the driver supports CUDA 12.2, the runtime needs 13.0");
  emulation::SetMachine({.device_count = 0});
  ExpectFails(Open(Options()), PQC_FAILED_PRECONDITION, "no device support: looking for a GPU");
  emulation::SetMachine({.compute_major = 7, .compute_minor = 5});
  ExpectFails(Open(Options()), PQC_UNIMPLEMENTED, "compute capability 7.5");
  emulation::SetMachine({});
  for (int after = 0; after < 3; ++after) {
    emulation::FailCall("cudaMalloc", cudaErrorMemoryAllocation, after);
    ExpectFails(Open(Options()), PQC_RESOURCE_EXHAUSTED, "bytes of device memory");
    emulation::Reset();
  }
  emulation::FailCall("cudaHostAlloc", cudaErrorMemoryAllocation);
  ExpectFails(Open(Options()), PQC_RESOURCE_EXHAUSTED, "bytes of page-locked memory");
  emulation::Reset();
  ExpectOk(Open(Options()));
}

#endif

}  // namespace
}  // namespace pqcached

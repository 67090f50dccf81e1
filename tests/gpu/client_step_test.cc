// The client's steps with device pointers and a stream, a stand-in for the sidecar behind them: what they give is full attention
// where everything is selected, attention over what they say they selected elsewhere, and the same whether codes stay on
// the device or are copied one layer ahead. One source for two programs, as everything here; needs no store and no gRPC.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <iterator>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "client/error.h"
#include "client/gpu.h"
#include "gpu/device.h"
#include "gpu/graph.h"
#include "pqcached/gpu.h"
#include "tests/gpu/device_array.h"
#include "tests/gpu/pool_client.h"

extern "C" const pqcached::gpu::GpuEntry* pqcached_gpu_entry();

namespace pqcached {
namespace {

constexpr uint32_t kLayers = 5;
constexpr uint32_t kKvHeads = 2;
constexpr uint32_t kGroup = 2;
constexpr uint32_t kQueryHeads = kKvHeads * kGroup;
constexpr uint32_t kDim = 32;  // of keys and values
constexpr uint32_t kTokens = 640;
constexpr uint32_t kPrefill = 600;
constexpr uint32_t kSink = 4;
constexpr uint32_t kWindow = 16;
constexpr uint32_t kTokenCapacity = 1024;
constexpr size_t kLayerCodes = kKvHeads * 2 * kTokenCapacity;  // two planes
constexpr size_t kTokenFloats = kKvHeads * kDim;
constexpr size_t kQueryFloats = kQueryHeads * kDim;

void ExpectOk(pqc_status status) { ASSERT_EQ(status, PQC_OK) << pqc_last_error(); }

void ExpectFails(pqc_status status, pqc_status expected, const std::string& part) {
  EXPECT_EQ(status, expected) << pqc_last_error();
  EXPECT_TRUE(std::string(pqc_last_error()).find(part) != std::string::npos) << pqc_last_error();
}

struct Shaped {
  Shaped(const float* data, pqc_device device, uint64_t tokens, uint64_t heads)
      : shape{tokens, heads, kDim} {
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

// What a layer of a step gave.
struct Results {
  std::vector<float> output, lse;
  std::vector<uint32_t> positions, counts;  // [kv_heads, kTokenCapacity], [kv_heads]

  friend bool operator==(const Results&, const Results&) = default;
};

// What one layer writes, and where.
struct LayerTensors {
  DeviceArray<float> queries{kQueryFloats}, output{kQueryFloats}, lse{kQueryHeads};
  DeviceArray<uint32_t> positions{kKvHeads * kTokenCapacity}, counts{kKvHeads};
};

class ClientStepTest : public DeviceTest {
 protected:
  void SetUp() override {
    DeviceTest::SetUp();
    if (!WhyNoDevice().empty()) return;
    // Eighths: what the cache's f16 holds exactly.
    std::mt19937 random(3);
    std::uniform_int_distribution<int> eighths(-16, 16);
    const auto fill = [&](std::vector<float>& numbers, size_t count) {
      numbers.resize(count);
      for (float& number : numbers) number = static_cast<float>(eighths(random)) / 8;
    };
    for (uint32_t layer = 0; layer < kLayers; ++layer) {
      fill(keys_[layer], kTokens * kTokenFloats);
      fill(values_[layer], kTokens * kTokenFloats);
      fill(queries_[layer], kQueryFloats);
    }
    OpenClient({});
  }

  void TearDown() override {
    CloseClient();
    DeviceTest::TearDown();
  }

  void CloseClient() {
    pqc_gpu_close(gpu_);
    gpu_ = nullptr;
    Drop();
    pqc_cache_close(cache_);
    cache_ = nullptr;
    pqc_client_close(client_);
    client_ = nullptr;
  }

  void OpenClient(const testing::PoolSidecar::ClientOptions& options) {
    CloseClient();
    client_ = sidecar_.OpenClient(options);
    OpenCache();
  }

  void OpenCache() {
    uint32_t layers[kLayers];
    std::iota(layers, layers + kLayers, 0u);
    pqc_layer_group group = PQC_INIT(pqc_layer_group);
    group.kind = PQC_LAYERS_SELECTED;
    group.layers = layers;
    group.layer_count = kLayers;
    group.kv_heads = kKvHeads;
    group.query_heads = kQueryHeads;
    group.key_dim = group.value_dim = kDim;
    group.dtype = PQC_F16;
    pqc_cache_spec spec = PQC_INIT(pqc_cache_spec);
    spec.name = spec.model_fingerprint = "cache";
    spec.groups = &group;
    spec.group_count = 1;
    spec.capacity_bytes = 1 << 20;
    ExpectOk(pqc_cache_open(client_, &spec, &cache_));
  }

  pqc_status OpenGpu(uint64_t codes_bytes) {
    pqc_gpu_close(gpu_);
    gpu_ = nullptr;
    pqc_gpu_options options = PQC_INIT(pqc_gpu_options);
    options.sequence_capacity = 1;
    options.token_capacity = kTokenCapacity;
    options.selected_capacity = kTokenCapacity;
    options.cache_tokens = 256;
    options.codes_bytes = codes_bytes;
    return client::Call(
        [&] { return client::OpenGpu(cache_, &options, pqcached_gpu_entry(), &gpu_); });
  }

  void Drop() {
    if (sequence_ != nullptr) ExpectOk(pqc_sequence_drop(sequence_));
    sequence_ = nullptr;
  }

  // A sequence of kPrefill tokens with its index.
  void Fill() {
    Drop();
    ExpectOk(pqc_sequence_create(cache_, &sequence_));
    for (uint32_t layer = 0; layer < kLayers; ++layer) {
      const Shaped keys(keys_[layer].data(), PQC_CPU, kPrefill, kKvHeads);
      const Shaped values(values_[layer].data(), PQC_CPU, kPrefill, kKvHeads);
      ExpectOk(pqc_ingest(sequence_, layer, 0, &keys.tensor, &values.tensor));
    }
    BuildIndex();
  }

  void BuildIndex() {
    pqc_build_options options = PQC_INIT(pqc_build_options);
    ExpectOk(pqc_build_index(sequence_, &options));
  }

  pqc_status Begin(uint64_t position, double ratio, pqc_step** step) {
    pqc_step_item item = PQC_INIT(pqc_step_item);
    item.sequence = sequence_;
    item.query_position = position;
    pqc_selection selection = PQC_INIT(pqc_selection);
    selection.sink_tokens = kSink;
    selection.window_tokens = kWindow;
    selection.budget = PQC_BUDGET_RATIO;
    selection.ratio = ratio;
    pqc_step_options options = PQC_INIT(pqc_step_options);
    options.selection = &selection;
    return pqc_gpu_step_begin(gpu_, &item, 1, &options, stream_, step);
  }

  // Select and attend of one layer.
  pqc_status RunLayer(pqc_step* step, uint32_t layer) {
    LayerTensors& tensors = *tensors_[layer];
    const Shaped queries(tensors.queries.data(), PQC_CUDA, 1, kQueryHeads);
    pqc_gpu_positions selected = PQC_INIT(pqc_gpu_positions);
    selected.positions = tensors.positions.data();
    selected.stride = kTokenCapacity;
    selected.counts = tensors.counts.data();
    const pqc_status status = pqc_gpu_step_select(step, layer, &queries.tensor, &selected);
    if (status != PQC_OK) return status;
    pqc_step_attention out = PQC_INIT(pqc_step_attention);
    out.output = tensors.output.data();
    out.output_capacity = tensors.output.size();
    out.lse = tensors.lse.data();
    out.lse_capacity = tensors.lse.size();
    return pqc_step_attend(step, layer, &queries.tensor, nullptr, &out);
  }

  void PrepareTensors() {
    tensors_.clear();
    for (uint32_t layer = 0; layer < kLayers; ++layer) {
      tensors_.push_back(std::make_unique<LayerTensors>());
      tensors_[layer]->queries.Set(queries_[layer]);
      tensors_[layer]->positions.Set(std::vector<uint32_t>(kKvHeads * kTokenCapacity, 0));
    }
  }

  Results Get(uint32_t layer) const {
    const LayerTensors& tensors = *tensors_[layer];
    EXPECT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
    return {tensors.output.Get(), tensors.lse.Get(), tensors.positions.Get(), tensors.counts.Get()};
  }

  // Ends with the rows of the token at `position`, on the device.
  pqc_status End(pqc_step* step, uint64_t position) {
    std::vector<std::unique_ptr<DeviceArray<float>>> arrays;
    std::vector<std::unique_ptr<Shaped>> shaped;
    const auto on_device = [&](const std::vector<float>& numbers) {
      const auto begin = numbers.begin() + static_cast<ptrdiff_t>(position * kTokenFloats);
      arrays.push_back(
          std::make_unique<DeviceArray<float>>(std::vector<float>(begin, begin + kTokenFloats)));
      shaped.push_back(std::make_unique<Shaped>(arrays.back()->data(), PQC_CUDA, 1, kKvHeads));
      return shaped.back()->tensor;
    };
    std::vector<pqc_layer_rows> rows(kLayers, PQC_INIT(pqc_layer_rows));
    for (uint32_t layer = 0; layer < kLayers; ++layer) {
      rows[layer].layer = layer;
      rows[layer].keys = on_device(keys_[layer]);
      rows[layer].values = on_device(values_[layer]);
    }
    return pqc_step_end(step, rows.data(), kLayers, nullptr);
  }

  // A step launched layer by layer, in this order.
  std::vector<Results> Decode(uint64_t position, double ratio, const std::vector<uint32_t>& order) {
    PrepareTensors();
    std::vector<Results> results;
    pqc_step* step = nullptr;
    EXPECT_EQ(Begin(position, ratio, &step), PQC_OK) << pqc_last_error();
    if (step == nullptr) return results;
    for (const uint32_t layer : order) {
      EXPECT_EQ(RunLayer(step, layer), PQC_OK) << pqc_last_error();
    }
    for (uint32_t layer = 0; layer < kLayers; ++layer) results.push_back(Get(layer));
    EXPECT_EQ(End(step, position), PQC_OK) << pqc_last_error();
    return results;
  }

  // That the results are attention over these positions of each kv head, in double.
  void ExpectAttention(uint32_t layer, const Results& results,
                       const std::vector<std::vector<uint32_t>>& positions) {
    for (uint32_t head = 0; head < kQueryHeads; ++head) {
      const uint32_t kv_head = head / kGroup;
      double sum = 0;
      std::vector<double> output(kDim);
      for (const uint32_t token : positions[kv_head]) {
        const size_t row = (token * kKvHeads + kv_head) * kDim;
        double logit = 0;
        for (uint32_t i = 0; i < kDim; ++i) {
          logit += double{queries_[layer][head * kDim + i]} * keys_[layer][row + i];
        }
        const double weight = std::exp(logit / std::sqrt(double{kDim}));
        for (uint32_t i = 0; i < kDim; ++i) output[i] += weight * values_[layer][row + i];
        sum += weight;
      }
      ASSERT_NEAR(results.lse[head], std::log(sum), 1e-4) << "layer " << layer;
      for (uint32_t i = 0; i < kDim; ++i) {
        ASSERT_NEAR(results.output[head * kDim + i], output[i] / sum, 1e-4) << "layer " << layer;
      }
    }
  }

  // A step at `position` that selects everything.
  void ExpectFullAttention(uint64_t position) {
    const std::vector<Results> results = Decode(position, 1.0, in_order_);
    std::vector<uint32_t> middle(position + 1 - kWindow - kSink);
    std::iota(middle.begin(), middle.end(), kSink);
    ASSERT_EQ(results.size(), size_t{kLayers});
    for (uint32_t layer = 0; layer < kLayers; ++layer) {
      ExpectAttention(layer, results[layer], {middle, middle});
    }
  }

  // In the order of the stream; page-locked, so that nothing waits.
  void Overwrite(const DeviceArray<float>& to, const std::vector<float>& from, size_t begin) {
    pinned_.push_back(std::make_unique<gpu::PinnedBuffer>());
    ASSERT_TRUE(pinned_.back()->Allocate(to.bytes()).ok());
    std::memcpy(pinned_.back()->data(), from.data() + begin, to.bytes());
    ASSERT_EQ(cudaMemcpyAsync(to.data(), pinned_.back()->data(), to.bytes(), cudaMemcpyHostToDevice,
                              stream_),
              cudaSuccess);
  }

  static std::vector<std::vector<uint32_t>> SelectedBy(const Results& results) {
    std::vector<std::vector<uint32_t>> positions;
    for (uint32_t head = 0; head < kKvHeads; ++head) {
      const auto begin = results.positions.begin() + static_cast<ptrdiff_t>(head * kTokenCapacity);
      positions.emplace_back(begin, begin + results.counts[head]);
    }
    return positions;
  }

  pqc_gpu_counts Counts() {
    pqc_gpu_counts counts = PQC_INIT(pqc_gpu_counts);
    EXPECT_EQ(pqc_gpu_count(gpu_, &counts), PQC_OK);
    return counts;
  }

  const std::vector<uint32_t> in_order_ = {0, 1, 2, 3, 4};
  testing::PoolSidecar sidecar_;
  pqc_client* client_ = nullptr;
  pqc_cache* cache_ = nullptr;
  pqc_sequence* sequence_ = nullptr;
  pqc_gpu* gpu_ = nullptr;
  std::vector<float> keys_[kLayers], values_[kLayers];  // [tokens, kv_heads, dim]
  std::vector<float> queries_[kLayers];                 // [query_heads, dim]
  std::vector<std::unique_ptr<LayerTensors>> tensors_;
  std::vector<std::unique_ptr<gpu::PinnedBuffer>> pinned_;
};

TEST_F(ClientStepTest, WhereAllIsSelectedItIsFullAttention) {
  ExpectOk(OpenGpu(0));
  Fill();
  for (uint64_t position = kPrefill; position < kPrefill + 10; ++position) {
    ExpectFullAttention(position);
    if (HasFatalFailure()) return;
  }
  EXPECT_EQ(Counts().resident_layers, kLayers);
}

TEST_F(ClientStepTest, CodesOnTheDeviceAndCodesCopiedAheadSelectAndAttendTheSame) {
  const std::vector<uint32_t> orders[] = {
      in_order_, {4, 3, 2, 1, 0}, {0, 0, 1, 3, 3, 2, 4, 1}, {2, 4, 0, 1, 3}};
  std::vector<std::vector<Results>> resident;
  for (const size_t layers : {size_t{0}, size_t{2}, size_t{3}, size_t{4}}) {
    ExpectOk(OpenGpu(layers * kLayerCodes));
    EXPECT_EQ(Counts().resident_layers, layers == 0 ? kLayers : layers - 2);
    Fill();
    for (uint64_t step = 0; step < 12; ++step) {
      const std::vector<Results> results = Decode(kPrefill + step, 0.2, orders[step % 4]);
      ASSERT_EQ(results.size(), size_t{kLayers});
      if (layers == 0) {
        for (uint32_t layer = 0; layer < kLayers; ++layer) {
          ASSERT_GT(results[layer].counts[0], 60u);
          ExpectAttention(layer, results[layer], SelectedBy(results[layer]));
        }
        resident.push_back(results);
      }
      ASSERT_TRUE(results == resident[step]) << layers << " layers of codes, step " << step;
      if (HasFatalFailure()) return;
    }
  }
}

TEST_F(ClientStepTest, GraphsOfOneLayerAndOfManyBringTheirOwnCodes) {
  std::vector<std::vector<Results>> resident;
  for (const size_t layers : {size_t{0}, size_t{2}, size_t{3}}) {
    ExpectOk(OpenGpu(layers * kLayerCodes));
    Fill();
    PrepareTensors();
    gpu::Graph first, rest;
    for (uint64_t position = kPrefill; position < kPrefill + 8; ++position) {
      pqc_step* step = nullptr;
      ExpectOk(Begin(position, 0.2, &step));
      ASSERT_TRUE(step != nullptr);
      const auto capture = [&](gpu::Graph& graph, uint32_t begin, uint32_t end) {
        ASSERT_TRUE(graph.Begin(stream_).ok());
        for (uint32_t layer = begin; layer < end; ++layer) ExpectOk(RunLayer(step, layer));
        ASSERT_TRUE(graph.End().ok());
      };
      if (position == kPrefill) {
        capture(first, 0, 1);
        capture(rest, 1, kLayers);
      }
      if (HasFatalFailure()) return;
      // A layer that is launched too, before and after a graph has used its slot for others.
      constexpr uint32_t kBothWays = 2;
      ASSERT_TRUE(first.Launch(stream_).ok());
      if (position % 2 == 1) ExpectOk(RunLayer(step, kBothWays));
      ASSERT_TRUE(rest.Launch(stream_).ok());
      if (position % 2 == 1) ExpectOk(RunLayer(step, kBothWays));
      std::vector<Results> results;
      for (uint32_t layer = 0; layer < kLayers; ++layer) results.push_back(Get(layer));
      ExpectOk(End(step, position));
      if (layers == 0) resident.push_back(results);
      ASSERT_TRUE(results == resident[position - kPrefill]) << layers << " at " << position;
      if (HasFatalFailure()) return;
    }
  }
}

TEST_F(ClientStepTest, PrefillFromTheDeviceIsStoredBehindTheStream) {
  ExpectOk(OpenGpu(0));
  ExpectOk(pqc_sequence_create(cache_, &sequence_));
  // Chunk by chunk through the same memory, which the next chunk overwrites in the stream's order.
  constexpr uint32_t kChunk = 200;
  DeviceArray<float> keys(kChunk * kTokenFloats), values(kChunk * kTokenFloats);
  for (uint32_t begin = 0; begin < kPrefill; begin += kChunk) {
    for (uint32_t layer = 0; layer < kLayers; ++layer) {
      Overwrite(keys, keys_[layer], begin * kTokenFloats);
      Overwrite(values, values_[layer], begin * kTokenFloats);
      const Shaped k(keys.data(), PQC_CUDA, kChunk, kKvHeads);
      const Shaped v(values.data(), PQC_CUDA, kChunk, kKvHeads);
      ExpectOk(pqc_gpu_ingest(gpu_, sequence_, layer, begin, &k.tensor, &v.tensor, stream_));
    }
  }
  BuildIndex();  // waits for the rows
  EXPECT_EQ(sidecar_.commit_count(), kLayers * kPrefill / kChunk);
  ExpectFullAttention(kPrefill);
}

TEST_F(ClientStepTest, PrefillFromBlocksIsStoredInTheOrderOfTheTable) {
  OpenClient({.slot_bytes = 32 << 10});  // a layer takes several, which begin within blocks
  ExpectOk(OpenGpu(0));
  ExpectOk(pqc_sequence_create(cache_, &sequence_));
  constexpr uint32_t kBlockTokens = 16, kBlocks = kTokens / kBlockTokens;
  std::vector<uint32_t> order(kBlocks);  // where each block of the sequence lies
  for (uint32_t block = 0; block < kBlocks; ++block) order[block] = (block * 7 + 3) % kBlocks;
  for (uint32_t layer = 0; layer < kLayers; ++layer) {
    // [blocks, K and V, tokens, heads, dim]
    constexpr size_t kBlockFloats = kBlockTokens * kTokenFloats;
    std::vector<float> pages(kBlocks * 2 * kBlockFloats);
    for (uint32_t block = 0; block < kBlocks; ++block) {
      const auto from = static_cast<ptrdiff_t>(block * kBlockFloats);
      const auto to = pages.begin() + static_cast<ptrdiff_t>(order[block] * 2 * kBlockFloats);
      std::copy_n(keys_[layer].begin() + from, kBlockFloats, to);
      std::copy_n(values_[layer].begin() + from, kBlockFloats,
                  to + static_cast<ptrdiff_t>(kBlockFloats));
    }
    const DeviceArray<float> device_pages(pages);
    pqc_block_table table = PQC_INIT(pqc_block_table);
    std::vector<uint32_t> blocks = order;
    table.blocks = blocks.data();
    table.block_count = blocks.size();
    table.block_tokens = kBlockTokens;
    table.token_count = kPrefill;
    const uint64_t shape[] = {kBlocks, kBlockTokens, kKvHeads, kDim};
    const int64_t strides[] = {2 * kBlockFloats, kTokenFloats, kDim, 1};
    pqc_tensor k = PQC_INIT(pqc_tensor);
    k.ptr = device_pages.data();
    k.device = PQC_CUDA;
    k.dtype = PQC_F32;
    k.ndim = 4;
    k.shape = shape;
    k.strides = strides;
    k.block_table = &table;
    pqc_tensor v = k;
    v.ptr = device_pages.data() + kBlockFloats;
    ExpectOk(pqc_gpu_ingest(gpu_, sequence_, layer, 0, &k, &v, stream_));
    blocks.assign(blocks.size(), kBlocks);    // the caller's again
    ExpectOk(pqc_sequence_flush(sequence_));  // the pages go
  }
  BuildIndex();
  ExpectFullAttention(kPrefill);
}

TEST_F(ClientStepTest, PrefillGoesOnUntilNoSlotIsLeft) {
  constexpr uint32_t kTimeoutMs = 1000;
  OpenClient({.slot_count = 2, .timeout_ms = kTimeoutMs});
  ExpectOk(OpenGpu(0));
  ExpectOk(pqc_sequence_create(cache_, &sequence_));
  const DeviceArray<float> keys(keys_[0]), values(values_[0]);
  const Shaped k(keys.data(), PQC_CUDA, kPrefill, kKvHeads);
  const Shaped v(values.data(), PQC_CUDA, kPrefill, kKvHeads);
  const auto ingest = [&](uint32_t layer) {
    return pqc_gpu_ingest(gpu_, sequence_, layer, 0, &k.tensor, &v.tensor, stream_);
  };
  sidecar_.CloseGate();
  ExpectOk(ingest(0));
  ExpectOk(ingest(1));
  ExpectFails(ingest(2), PQC_DEADLINE_EXCEEDED, "all 2 slots are in flight");
  ExpectFails(pqc_sequence_flush(sequence_), PQC_DEADLINE_EXCEEDED, "not stored in time");
  sidecar_.OpenGate();
  ExpectOk(pqc_sequence_flush(sequence_));
  EXPECT_EQ(sidecar_.commit_count(), 2u);
  for (uint32_t layer = 2; layer < kLayers; ++layer) ExpectOk(ingest(layer));
  ExpectOk(pqc_sequence_flush(sequence_));
  EXPECT_EQ(sidecar_.commit_count(), uint64_t{kLayers});
}

TEST_F(ClientStepTest, WhatFailsInThePrefillIsToldAndWhatFollowsIsNotSent) {
  ExpectOk(OpenGpu(0));
  ExpectOk(pqc_sequence_create(cache_, &sequence_));
  std::vector<std::unique_ptr<DeviceArray<float>>> arrays;
  const auto ingest = [&](uint32_t layer) {
    arrays.push_back(std::make_unique<DeviceArray<float>>(keys_[layer]));
    const Shaped k(arrays.back()->data(), PQC_CUDA, kPrefill, kKvHeads);
    arrays.push_back(std::make_unique<DeviceArray<float>>(values_[layer]));
    const Shaped v(arrays.back()->data(), PQC_CUDA, kPrefill, kKvHeads);
    return pqc_gpu_ingest(gpu_, sequence_, layer, 0, &k.tensor, &v.tensor, stream_);
  };
  sidecar_.CloseGate();
  sidecar_.RefuseCommits(1);
  ExpectOk(ingest(0));
  ExpectOk(ingest(1));
  sidecar_.OpenGate();
  ExpectFails(pqc_sequence_flush(sequence_), PQC_INVALID_ARGUMENT,
              "rows of an earlier pqc_gpu_ingest: rows[0].keys: refused by the test");
  EXPECT_EQ(sidecar_.commit_count(), 1u);
  ExpectOk(pqc_sequence_flush(sequence_));  // it is told once
  for (uint32_t layer = 0; layer < kLayers; ++layer) ExpectOk(ingest(layer));
  BuildIndex();
  ExpectFullAttention(kPrefill);

  // One that is dropped with rows on their way; the GPU is closed with others.
  sidecar_.CloseGate();
  ExpectOk(ingest(0));
  ExpectOk(ingest(1));
  sidecar_.OpenGate();
  Drop();
  ExpectOk(pqc_sequence_create(cache_, &sequence_));
  ExpectOk(ingest(0));
  pqc_gpu_close(gpu_);
  gpu_ = nullptr;
  ExpectOk(pqc_sequence_flush(sequence_));
}

TEST_F(ClientStepTest, PrefillGoesOnWhileAnotherStreamCaptures) {
  ExpectOk(OpenGpu(0));
  ExpectOk(pqc_sequence_create(cache_, &sequence_));
  const DeviceArray<float> keys(keys_[0]), values(values_[0]);
  const Shaped k(keys.data(), PQC_CUDA, kPrefill, kKvHeads);
  const Shaped v(values.data(), PQC_CUDA, kPrefill, kKvHeads);
  cudaStream_t other = nullptr;
  ASSERT_EQ(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking), cudaSuccess);
  gpu::Graph graph;
  ASSERT_TRUE(graph.Begin(other).ok());
  ExpectOk(pqc_gpu_ingest(gpu_, sequence_, 0, 0, &k.tensor, &v.tensor, stream_));
  ExpectFails(pqc_gpu_ingest(gpu_, sequence_, 0, 0, &k.tensor, &v.tensor, other),
              PQC_INVALID_ARGUMENT, "the stream captures");
  ExpectOk(pqc_sequence_flush(sequence_));
  EXPECT_EQ(sidecar_.commit_count(), 1u);
  EXPECT_TRUE(graph.End().ok());
  EXPECT_EQ(cudaStreamDestroy(other), cudaSuccess);
}

TEST_F(ClientStepTest, WhatCannotBeIsRefusedByName) {
  ExpectFails(OpenGpu(2 * kLayerCodes - 1), PQC_INVALID_ARGUMENT, "codes_bytes");
  ExpectOk(OpenGpu(2 * kLayerCodes));
  Fill();
  PrepareTensors();
  pqc_step* step = nullptr;
  ExpectOk(Begin(kPrefill, 0.2, &step));
  ExpectOk(RunLayer(step, 0));
  gpu::Graph graph;
  ASSERT_TRUE(graph.Begin(stream_).ok());
  ExpectFails(RunLayer(step, 1), PQC_INVALID_ARGUMENT, "capture in a step of its own");
  (void)graph.End();
  ExpectOk(End(step, kPrefill));
}

}  // namespace
}  // namespace pqcached

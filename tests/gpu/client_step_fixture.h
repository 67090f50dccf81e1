// The client's steps and prefill with device pointers and a stream, and a stand-in for the sidecar behind them.
#ifndef PQCACHED_TESTS_GPU_CLIENT_STEP_FIXTURE_H_
#define PQCACHED_TESTS_GPU_CLIENT_STEP_FIXTURE_H_

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

#include "client/base/error.h"
#include "client/gpu/gpu.h"
#include "gpu/device.h"
#include "pqcached/gpu.h"
#include "tests/gpu/device_array.h"
#include "tests/gpu/pool_client.h"
#if defined(PQCACHED_CUDA_EMULATION)
#include "tests/gpu/emulation/emulation.h"
#endif

extern "C" const pqcached::gpu::GpuEntry* pqcached_gpu_entry();

namespace pqcached::testing {

inline constexpr uint32_t kLayers = 5;
inline constexpr uint32_t kKvHeads = 2;
inline constexpr uint32_t kGroup = 2;
inline constexpr uint32_t kQueryHeads = kKvHeads * kGroup;
inline constexpr uint32_t kDim = 32;  // of keys and values
inline constexpr uint32_t kTokens = 704;
inline constexpr uint32_t kPrefill = 600;
inline constexpr uint32_t kSink = 4;
inline constexpr uint32_t kWindow = 16;
inline constexpr uint32_t kTokenCapacity = 1024;
inline constexpr size_t kLayerCodes = kKvHeads * 2 * kTokenCapacity;  // two planes
inline constexpr size_t kTokenFloats = kKvHeads * kDim;
inline constexpr size_t kQueryFloats = kQueryHeads * kDim;

inline void ExpectOk(pqc_status status) { ASSERT_EQ(status, PQC_OK) << pqc_last_error(); }

inline void ExpectFails(pqc_status status, pqc_status expected, const std::string& part) {
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

  void OpenClient(const PoolSidecar::ClientOptions& options) {
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
    spec.default_index.kind = PQC_INDEX_PQ;
    spec.default_index.subspaces = PoolSidecar::kIndex.subspace_count;
    spec.default_index.bits = PoolSidecar::kIndex.bits;
    ExpectOk(pqc_cache_open(client_, &spec, &cache_));
  }

  pqc_status OpenGpu(uint64_t codes_bytes, uint32_t cache_tokens = 256) {
    pqc_gpu_close(gpu_);
    gpu_ = nullptr;
    pqc_gpu_options options = PQC_INIT(pqc_gpu_options);
    options.sequence_capacity = 1;
    options.token_capacity = kTokenCapacity;
    options.selected_capacity = kTokenCapacity;
    options.cache_tokens = cache_tokens;
    options.codes_bytes = codes_bytes;
    return client::Call(
        [&] { return client::OpenGpu(cache_, &options, pqcached_gpu_entry(), &gpu_); });
  }

  void Drop() {
    if (sequence_ != nullptr) ExpectOk(pqc_sequence_drop(sequence_));
    sequence_ = nullptr;
  }

  // A sequence of so many tokens with its index.
  void Fill(uint32_t token_count = kPrefill) {
    FillRows(token_count);
    BuildIndex();
  }

  // A sequence of so many tokens without an index.
  void FillRows(uint32_t token_count = kPrefill) {
    Drop();
    ExpectOk(pqc_sequence_create(cache_, &sequence_));
    for (uint32_t layer = 0; layer < kLayers; ++layer) {
      const Shaped keys(keys_[layer].data(), PQC_CPU, token_count, kKvHeads);
      const Shaped values(values_[layer].data(), PQC_CPU, token_count, kKvHeads);
      ExpectOk(pqc_ingest(sequence_, layer, 0, &keys.tensor, &values.tensor));
    }
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

  // A step without a selection.
  pqc_status BeginRows(uint64_t position, pqc_step** step) {
    pqc_step_item item = PQC_INIT(pqc_step_item);
    item.sequence = sequence_;
    item.query_position = position;
    const pqc_step_options options = PQC_INIT(pqc_step_options);
    return pqc_gpu_step_begin(gpu_, &item, 1, &options, stream_, step);
  }

  pqc_status Select(pqc_step* step, uint32_t layer, uint64_t stride) {
    LayerTensors& tensors = *tensors_[layer];
    const Shaped queries(tensors.queries.data(), PQC_CUDA, 1, kQueryHeads);
    pqc_gpu_positions selected = PQC_INIT(pqc_gpu_positions);
    selected.positions = tensors.positions.data();
    selected.stride = stride;
    selected.counts = tensors.counts.data();
    return pqc_gpu_step_topk(step, layer, &queries.tensor, &selected);
  }

  // Select and attend of one layer.
  pqc_status RunLayer(pqc_step* step, uint32_t layer) {
    if (const pqc_status status = Select(step, layer, kTokenCapacity); status != PQC_OK) {
      return status;
    }
    LayerTensors& tensors = *tensors_[layer];
    const Shaped queries(tensors.queries.data(), PQC_CUDA, 1, kQueryHeads);
    pqc_step_attention out = Out(layer);
    return pqc_step_attend(step, layer, &queries.tensor, nullptr, &out);
  }

  // Where an attention of a layer is written.
  pqc_step_attention Out(uint32_t layer) const {
    const LayerTensors& tensors = *tensors_[layer];
    pqc_step_attention out = PQC_INIT(pqc_step_attention);
    out.output = tensors.output.data();
    out.output_capacity = tensors.output.size();
    out.lse = tensors.lse.data();
    out.lse_capacity = tensors.lse.size();
    return out;
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

  // Ends with the rows of the token at `position`.
  pqc_status End(pqc_step* step, uint64_t position, pqc_device device = PQC_CUDA) {
    std::vector<std::unique_ptr<DeviceArray<float>>> arrays;
    std::vector<std::unique_ptr<Shaped>> shaped;
    const auto row_of = [&](const std::vector<float>& numbers) {
      if (device == PQC_CPU) {
        shaped.push_back(std::make_unique<Shaped>(numbers.data() + position * kTokenFloats, PQC_CPU,
                                                  1, kKvHeads));
        return shaped.back()->tensor;
      }
      const auto begin = numbers.begin() + static_cast<ptrdiff_t>(position * kTokenFloats);
      arrays.push_back(
          std::make_unique<DeviceArray<float>>(std::vector<float>(begin, begin + kTokenFloats)));
      shaped.push_back(std::make_unique<Shaped>(arrays.back()->data(), PQC_CUDA, 1, kKvHeads));
      return shaped.back()->tensor;
    };
    std::vector<pqc_layer_rows> rows(kLayers, PQC_INIT(pqc_layer_rows));
    for (uint32_t layer = 0; layer < kLayers; ++layer) {
      rows[layer].layer = layer;
      rows[layer].keys = row_of(keys_[layer]);
      rows[layer].values = row_of(values_[layer]);
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
  PoolSidecar sidecar_;
  pqc_client* client_ = nullptr;
  pqc_cache* cache_ = nullptr;
  pqc_sequence* sequence_ = nullptr;
  pqc_gpu* gpu_ = nullptr;
  std::vector<float> keys_[kLayers], values_[kLayers];  // [tokens, kv_heads, dim]
  std::vector<float> queries_[kLayers];                 // [query_heads, dim]
  std::vector<std::unique_ptr<LayerTensors>> tensors_;
  std::vector<std::unique_ptr<gpu::PinnedBuffer>> pinned_;
};

}  // namespace pqcached::testing

#endif  // PQCACHED_TESTS_GPU_CLIENT_STEP_FIXTURE_H_

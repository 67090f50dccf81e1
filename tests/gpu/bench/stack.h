// Stack: decode steps of a model shaped like Llama-3.1-8B with random weights, whose attention reads its KV in one of three ways.
//
// Everything that a step reads of weights and of KV in device memory is there once per layer, as in a model. Rows that lie in
// host memory are one layer's of one sequence, read by all: what a step fetches over the bus is as much, and from as many
// places of a sequence. Queries of the selection drift (selections.h); those of the random model would be noise.
#ifndef PQCACHED_TESTS_GPU_BENCH_STACK_H_
#define PQCACHED_TESTS_GPU_BENCH_STACK_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "gpu/block_cache.h"
#include "kernels/cuda/attend.h"
#include "kernels/cuda/kcache.h"
#include "kernels/cuda/rows.h"
#include "tests/gpu/bench/bench.h"
#include "tests/gpu/bench/matrix.h"
#include "tests/gpu/bench/selections.h"

namespace pqcached::bench {

struct ModelShape {
  uint32_t layer_count = 32;
  uint32_t hidden = 4096;
  uint32_t ffn = 14336;
  uint32_t vocabulary = 128256;
  uint32_t query_heads = 32;
  uint32_t kv_heads = 8;
  uint32_t dim = 128;

  size_t row_bytes() const { return size_t{dim} * 4; }  // [key | value] in fp16
};

// Weights of all layers, and the products. Shared by stacks.
class Weights {
 public:
  explicit Weights(const ModelShape& shape);

  enum class Part { kQkv, kOut, kGateUp, kDown };
  const std::byte* Get(uint32_t layer, Part part) const;
  const std::byte* head() const { return head_->data(); }
  Matrix& matrix() { return matrix_; }

 private:
  ModelShape shape_;
  size_t layer_bytes_;
  std::unique_ptr<DeviceArray<std::byte>> layers_;
  std::unique_ptr<DeviceArray<std::byte>> head_;
  Matrix matrix_;
};

enum class KvMode {
  kNone,      // no attention at all
  kSelect,    // selects, attends to nothing
  kFull,      // all rows in device memory, all attended
  kSelected,  // codes in device memory, rows in host memory behind a block cache
  kKCache,    // keys in device memory, values in host memory
};

struct StackOptions {
  ModelShape model;
  KvMode mode = KvMode::kFull;
  uint32_t batch = 1;
  uint32_t token_count = 0;
  uint32_t k = 2048;             // of kSelected; N of kKCache
  uint32_t cache_tokens = 4096;  // 0: no block cache
  kernels::cuda::CachePolicy policy = kernels::cuda::CachePolicy::kFrequencyAdmission;
  uint32_t max_loads = 32;
  uint32_t kept_value_layers = 1;  // of kKCache
  uint32_t multiprocessor_count = 1;
};

// Bytes of device memory that one more sequence takes, for its KV alone.
size_t KvBytesPerSequence(const StackOptions& options);

class Stack {
 public:
  // Throws Absent when memory is short. `weights` outlives it.
  Stack(const StackOptions& options, Weights& weights, cudaStream_t stream);

  // Captures a step, then runs `step_count` of them; returns the seconds of each.
  std::vector<double> Run(cudaStream_t stream, int step_count);

  gpu::BlockCache::Counters Counters() const;

 private:
  uint32_t lanes() const { return options_.batch * options_.model.kv_heads; }
  uint32_t group() const { return options_.model.query_heads / options_.model.kv_heads; }
  void MakeFull();
  void MakeSelected(cudaStream_t stream);
  void MakeKCache();
  void MakeAttend(uint32_t row_capacity);
  std::vector<kernels::cuda::DeviceRowSpan> SpansOver(const std::byte* rows,
                                                      size_t row_bytes) const;
  void AllocateHostRows(size_t row_bytes);

  void GiveStep(cudaStream_t stream);
  void GiveLayer(cudaStream_t stream, uint32_t layer);
  void GiveAttention(cudaStream_t stream, uint32_t layer);
  void GiveAttend(cudaStream_t stream, uint32_t layer, const std::byte* const* addresses,
                  const uint32_t* counts) const;
  void GiveLocate(cudaStream_t stream, uint32_t layer, const uint32_t* positions,
                  const uint32_t* counts, size_t row_bytes) const;
  void GiveSelected(cudaStream_t stream, uint32_t layer);
  void GiveKCache(cudaStream_t stream, uint32_t layer) const;
  void Product(cudaStream_t stream, uint32_t layer, Weights::Part part, const std::byte* x,
               std::byte* y, bool adds);

  StackOptions options_;
  Weights& weights_;
  // Activations, fp16 unless said.
  DeviceArray<std::byte> x_, normed_, qkv_, wide_, narrow_, logits_, new_rows_;
  DeviceArray<float> queries_;    // [batch, query_heads, dim]
  DeviceArray<float> attention_;  // likewise
  DeviceArray<float> lse_;
  // Attention over rows.
  kernels::cuda::AttendShape shape_;
  std::unique_ptr<DeviceArray<std::byte>> scratch_;
  std::unique_ptr<DeviceArray<std::byte>> kv_;  // [layer, lane, token, row_bytes] or keys
  std::unique_ptr<DeviceArray<const std::byte*>> addresses_;
  std::unique_ptr<DeviceArray<uint32_t>> counts_;
  // Rows in host memory.
  gpu::PinnedBuffer host_rows_;
  std::unique_ptr<DeviceArray<kernels::cuda::RowLane>> row_lanes_;
  std::vector<std::unique_ptr<DeviceArray<kernels::cuda::DeviceRowSpan>>> spans_;  // per layer
  std::unique_ptr<Selections> selections_;
  std::vector<std::unique_ptr<gpu::BlockCache>> caches_;
  // KCache.
  std::unique_ptr<DeviceArray<kernels::cuda::KeyLane>> key_lanes_;  // [layer, lane]
  std::unique_ptr<DeviceArray<float>> scores_;
  std::unique_ptr<DeviceArray<kernels::cuda::SelectChunk>> chunks_;
  std::unique_ptr<DeviceArray<kernels::cuda::SelectLane>> select_lanes_;
  std::unique_ptr<DeviceArray<uint32_t>> positions_;
  std::unique_ptr<DeviceArray<std::byte>> kept_values_;
};

}  // namespace pqcached::bench

#endif  // PQCACHED_TESTS_GPU_BENCH_STACK_H_

// Steps: what libpqcached_gpu does for libpqcached_client. Decode steps over all layers of one cache on one device:
// select, look up in the block caches, bring rows, attend; all of it ordered by the engine's stream.
//
// The two libraries are bound apart, so that the client needs no CUDA: no memory changes its owner here, no type of
// the standard library crosses, nothing throws. Both must have the same kStepsVersion; it grows with every change of
// this file. Names no CUDA types; compiles without nvcc.
//
// A *seat* is where a sequence stays on the device from step to step: its codes, its blocks in the caches. What a step
// needs to know of sequences (where rows lie, candidates, k) goes into tables on the device between steps, so Select
// and Attend can be captured in a CUDA graph: they launch the same work for every step of the same query length,
// whatever the batch.
//
// Thread-compatible: one step at a time.
#ifndef PQCACHED_GPU_STEPS_H_
#define PQCACHED_GPU_STEPS_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "gpu/status.h"
#include "kernels/cuda/block_cache.h"
#include "kernels/dtype.h"
#include "kernels/group_rule.h"
#include "kernels/pq.h"

namespace pqcached::gpu {

inline constexpr uint32_t kStepsVersion = 4;
inline constexpr char kGpuEntrySymbol[] = "pqcached_gpu_entry";

// A Status that crosses between the libraries. Cut when longer.
struct [[nodiscard]] Outcome {
  Code code = Code::kOk;
  char text[512] = {};

  Outcome() = default;
  Outcome(const Status& status) : code(status.code()) {  // NOLINT: a Status is one
    const size_t length = std::min(status.message().size(), sizeof(text) - 1);
    std::memcpy(text, status.message().data(), length);
  }
  bool ok() const { return code == Code::kOk; }
};

// The form of all layers of a cache, and what is set aside for steps. Capacities fix launches and memory.
struct StepsOptions {
  int device = 0;
  uint32_t layer_count = 0;
  kernels::DType dtype = kernels::DType::kF16;
  uint32_t key_dim = 0;
  uint32_t value_dim = 0;
  uint32_t kv_heads = 0;
  uint32_t group_size = 0;
  float scale = 1.0f;
  kernels::PqGeometry geometry;    // of the index
  uint32_t sequence_capacity = 0;  // seats
  uint32_t token_capacity = 0;     // of the longest sequence
  uint32_t selected_capacity = 0;  // largest k
  uint32_t query_length = 1;       // longest; at most 8, and 64 with the group
  uint32_t span_capacity = 0;      // segments of a sequence
  uint32_t codebook_capacity = 0;  // of a sequence
  uint32_t range_capacity = 0;     // candidate ranges of an item
  uint32_t cache_tokens = 4096;    // of the block cache, per sequence and kv head; 0: no cache
  kernels::cuda::CachePolicy policy = kernels::cuda::CachePolicy::kFrequencyAdmission;
  uint32_t max_loads = 32;   // blocks of a sequence and kv head loaded behind one step
  uint64_t codes_bytes = 0;  // device memory for codes: at least two layers; 0: all layers
};

// The slots of one segment in one layer, in the pool.
struct StepSegment {
  uint32_t first_position = 0;
  uint32_t token_count = 0;
  const std::byte* const* rows = nullptr;  // [kv_heads]: first row of each head
  const uint8_t* planes = nullptr;         // of kv head 0; null: not coded yet
  size_t planes_head_stride = 0;           // bytes from head to head
  size_t plane_stride = 0;
  const float* centroids = nullptr;  // of kv head 0
  size_t centroids_head_stride = 0;  // bytes
  uint32_t codebook_epoch = 0;       // with the address: which codebook it is
};

struct StepRange {
  uint32_t begin = 0;
  uint32_t end = 0;
};

// One layer of one item.
struct StepLayer {
  const StepSegment* segments = nullptr;  // ascending without gap from position 0
  uint32_t segment_count = 0;
  uint32_t coded_tokens = 0;              // rows and codes below it are there and do not change
  const StepRange* candidates = nullptr;  // ascending, disjoint, coded
  uint32_t candidate_count = 0;           // ranges
  uint32_t select_count = 0;              // k, at most the candidates
};

struct StepSequence {
  uint64_t sequence = 0;  // never used again for another one
  uint32_t unchanged_tokens =
      0;  // rows and codes below it are those of the last step that the sequence was in
  uint32_t query_begin = 0;  // its first query token in packed tensors
};

struct StepBatch {
  const StepSequence* sequences = nullptr;  // [count], each once
  uint32_t count = 0;
  uint32_t query_length = 1;          // of every item
  const StepLayer* layers = nullptr;  // [count, layer_count]
  const std::byte* pool = nullptr;    // that all rows, planes and centroids lie in
  size_t pool_bytes = 0;
  void* stream = nullptr;  // a cudaStream_t of the device
};

// Queries [tokens, kv_heads * group_size, key_dim]; strides in elements.
struct StepQueries {
  const void* data = nullptr;
  kernels::DType dtype = kernels::DType::kF32;
  int64_t token_stride = 0;
  int64_t head_stride = 0;
  int64_t dim_stride = 1;
};

// K [tokens, kv_heads, key_dim] and V likewise of the query tokens of a step; strides in elements, dimensions
// contiguous.
struct StepRows {
  const void* keys = nullptr;
  const void* values = nullptr;
  kernels::DType key_dtype = kernels::DType::kF16;
  kernels::DType value_dtype = kernels::DType::kF16;
  int64_t key_strides[2] = {};  // token, head
  int64_t value_strides[2] = {};
  uint32_t token_count = 0;  // at most sequence_capacity * query_length
};

// K or V of prefill tokens on the device, [tokens, kv_heads, dim], or with a block table [blocks, tokens of a block,
// kv_heads, dim]; strides in elements, dimensions contiguous. `to` and the table lie in the staging ring.
struct StepPackTensor {
  const void* data = nullptr;
  kernels::DType dtype = kernels::DType::kF16;
  kernels::DType packed_dtype = kernels::DType::kF16;
  uint32_t dim = 0;
  uint32_t first_token = 0;  // of the tensor, or of what the block table tells
  int64_t block_stride = 0;
  int64_t token_stride = 0;
  int64_t head_stride = 0;
  const int32_t* block_table = nullptr;  // null: no blocks
  uint32_t block_tokens = 0;
  std::byte* to = nullptr;  // [token_count, kv_heads, dim] of packed_dtype
};

struct StepPack {
  StepPackTensor keys;
  StepPackTensor values;
  uint32_t kv_heads = 0;
  uint32_t token_count = 0;
  void* stream = nullptr;
};

struct StepsCounts {
  uint64_t hits = 0;    // rows found in the block caches
  uint64_t misses = 0;  // rows read from the pool
  uint64_t loaded = 0;  // blocks copied into the caches
  uint64_t evicted = 0;
  uint64_t device_bytes = 0;
  uint64_t locked_bytes = 0;     // of the pool, page-locked
  uint64_t generation = 0;       // grows when captured work has to be captured anew
  bool staged = false;           // some rows cannot be page-locked: the host brings them
  uint32_t resident_layers = 0;  // whose codes stay on the device
};

class Steps {
 public:
  // Between steps: brings codes of new tokens, page-locks rows, writes the tables, gives sequences seats; all on the
  // stream. What the batch points to may go when it returns, but the pool must stay as it is until Wait or Close.
  //
  // When not all codes are resident it waits for the step before.
  //
  // Errors: kInvalid      a field of the batch (the message names it and the limit); a stream of another device
  //         kOutOfMemory  more segments, codebooks or chunks than capacities have room for
  virtual Outcome Begin(const StepBatch& batch) = 0;
  // Lets the pool go; waits for the device. Before its memory is unmapped.
  virtual Outcome ReleasePool() = 0;

  // After Begin, on its stream. positions [items, kv_heads, stride], ascending, stride at least selected_capacity; counts
  // [items, kv_heads]; both on the device. May be captured.
  virtual Outcome Select(uint32_t layer, const StepQueries& queries, kernels::GroupRule rule,
                         uint32_t* positions, size_t stride, uint32_t* counts) = 0;
  // Likewise. output [tokens, query heads, value_dim] and lse [tokens, query heads] of the selected rows. Errors: kInvalid
  // also when the stream captures a layer that this step has launched
  virtual Outcome Attend(uint32_t layer, const StepQueries& queries, kernels::GroupRule rule,
                         float* output, float* lse) = 0;
  // Between Begin and End. Brings rows of new tokens to the host: *rows is [kv_heads, token_count, row] in page-locked
  // memory, of the cache's dtype, [key | value] back to back; filled after Wait, good until the next Begin.
  virtual Outcome Fetch(uint32_t layer, const StepRows& from, const void** rows) = 0;
  // What was looked up goes into the block caches, on side streams; the host does not wait. The step is over whatever it
  // returns; when that is an error, Wait does not know of its work, and the next Begin waits for the device.
  // Errors: kInvalid  the stream captures
  virtual Outcome End() = 0;
  // Waits until the work of the step that ended last is done, but for the updates of caches.
  virtual Outcome Wait() = 0;

  // Prefill; these three may be called beside steps. Page-locks the staging ring, [slot_count, size_bytes / slot_count], in
  // place of the one before, which nobody packs into any more. It stays mapped until another one is locked, or Close.
  virtual Outcome LockStaging(std::byte* ring, size_t size_bytes, uint32_t slot_count) = 0;
  // Launches the packing of K and V into a slot of the ring. Errors: kInvalid  a pointer, or a stream that captures
  virtual Outcome Pack(const StepPack& pack, uint32_t slot) = 0;
  // Waits until the slot's last Pack is done; from any thread, beside anything.
  virtual Outcome WaitPacked(uint32_t slot) = 0;

  // Beside steps, from any thread. Waits for what the block caches have been given.
  virtual Outcome Count(StepsCounts* counts) = 0;
  // Waits for the device, and destroys.
  virtual void Close() = 0;

 protected:
  ~Steps() = default;
};

struct GpuEntry {
  uint32_t steps_version;
  Outcome (*open)(const StepsOptions& options, Steps** steps);
};

}  // namespace pqcached::gpu

#endif  // PQCACHED_GPU_STEPS_H_

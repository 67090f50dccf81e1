// pqcached client: C++20 over gpu.h. A Gpu makes Steps of client.hpp whose queries, outputs and rows are on the device:
// tensors by Tensor::OnGpu, spans of device memory, which are passed on and never read.
//
//   auto gpu = pqcached::Gpu::Open(cache, {.token_capacity = 131072});
//   if (!gpu.ok()) ...  // no device support: the same steps with Client::BeginStep and host memory
//
// Owns its handle and moves; is destroyed before its client. Thread-safety, errors and limits are those of gpu.h.
#ifndef PQCACHED_GPU_HPP_
#define PQCACHED_GPU_HPP_

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "pqcached/client.hpp"
#include "pqcached/gpu.h"

namespace pqcached {

// As pqc_gpu_options; 0 = the default there.
struct GpuOptions {
  int32_t device = 0;
  uint32_t sequence_capacity = 0;
  uint64_t token_capacity = 0;  // has to be set
  uint64_t selected_capacity = 0;
  uint32_t query_length = 0;
  uint32_t segment_capacity = 0;
  uint32_t codebook_capacity = 0;
  bool block_cache = true;
  uint32_t cache_tokens = 0;
  uint32_t cache_loads = 0;
  pqc_gpu_policy policy = PQC_GPU_FREQUENCY;
  Index index = {};
  std::string gpu_library_path = {};
  uint64_t codes_bytes = 0;
};

class Gpu {
 public:
  static Result<Gpu> Open(const Cache& cache, const GpuOptions& options) {
    pqc_gpu_options c = PQC_INIT(pqc_gpu_options);
    c.device = options.device;
    c.sequence_capacity = options.sequence_capacity;
    c.token_capacity = options.token_capacity;
    c.selected_capacity = options.selected_capacity;
    c.query_length = options.query_length;
    c.segment_capacity = options.segment_capacity;
    c.codebook_capacity = options.codebook_capacity;
    c.no_block_cache = options.block_cache ? 0 : 1;
    c.cache_tokens = options.cache_tokens;
    c.cache_loads = options.cache_loads;
    c.policy = options.policy;
    c.index = options.index;
    c.gpu_library_path =
        options.gpu_library_path.empty() ? nullptr : options.gpu_library_path.c_str();
    c.codes_bytes = options.codes_bytes;
    pqc_gpu* gpu = nullptr;
    const pqc_status status = pqc_gpu_open(cache.get(), &c, &gpu);
    if (status != PQC_OK) return Status(status);
    return Gpu(gpu);
  }

  // Takes over a handle of the C ABI's.
  static Gpu Adopt(pqc_gpu* handle) { return Gpu(handle); }

  Result<pqc_gpu_counts> Count() const {
    pqc_gpu_counts counts = PQC_INIT(pqc_gpu_counts);
    const pqc_status status = pqc_gpu_count(handle_.get(), &counts);
    if (status != PQC_OK) return Status(status);
    return counts;
  }

  // K [tokens, kv_heads, key_dim] and V [tokens, kv_heads, value_dim] on the device, contiguous or paged, packed by `stream`, a
  // cudaStream_t, and stored behind it. Sequence::Flush waits for that.
  Status Ingest(Sequence& sequence, uint32_t layer, uint64_t first_position, const Tensor& keys,
                const Tensor& values, void* stream) {
    const pqc_tensor k = keys.c();
    const pqc_tensor v = values.c();
    return Status(
        pqc_gpu_ingest(handle_.get(), sequence.get(), layer, first_position, &k, &v, stream));
  }

  // A step whose work is given to `stream`. Its Attend and End take tensors and spans on the device; Select is Gpu's.
  Result<Step> BeginStep(std::span<const StepItem> items, const Selection& selection, void* stream,
                         uint32_t timeout_ms = 0) {
    const Step::Terms terms(items, &selection, timeout_ms);
    pqc_step* step = nullptr;
    const pqc_status status =
        pqc_gpu_step_begin(handle_.get(), terms.items.data(), static_cast<uint32_t>(items.size()),
                           &terms.options, stream, &step);
    if (status != PQC_OK) return Status(status);
    return Step(step, items.size());
  }

  // positions [items, kv_heads, stride], ascending, and counts [items, kv_heads], on the device. The stride is at least
  // selected_capacity.
  static Status Select(Step& step, uint32_t layer, const Tensor& queries,
                       std::span<uint32_t> positions, uint64_t stride, std::span<uint32_t> counts) {
    const pqc_tensor q = queries.c();
    pqc_gpu_positions out = PQC_INIT(pqc_gpu_positions);
    out.positions = positions.data();
    out.stride = stride;
    out.counts = counts.data();
    return Status(pqc_gpu_step_select(step.handle_.get(), layer, &q, &out));
  }

 private:
  struct Closer {
    void operator()(pqc_gpu* gpu) const { pqc_gpu_close(gpu); }
  };

  explicit Gpu(pqc_gpu* handle) : handle_(handle) {}

  std::unique_ptr<pqc_gpu, Closer> handle_;
};

}  // namespace pqcached

#endif  // PQCACHED_GPU_HPP_

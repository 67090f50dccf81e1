// pqcached client: C++20 over gpu.h. A Gpu makes Steps of client.hpp whose queries, outputs and
// rows (KV entries) are on the device: tensors by Tensor::OnGpu, and spans of device memory, which
// are passed on and never read.
//
// A Gpu owns its handle and moves; it is destroyed before its client. Each function calls the
// function of gpu.h that its comment names, where its errors and thread-safety are written.
//
// Example, one position of one sequence:
//
//     auto gpu = pqcached::Gpu::Open(cache, {.token_capacity = 131072});
//     if (!gpu.ok()) return gpu.status();  // no device: Client::BeginStep and host memory
//     const pqcached::Selection selection{.sink_tokens = 16, .window_tokens = 64, .ratio = 0.1};
//     auto step = gpu->BeginStep({&item, 1}, selection, stream);
//     if (!step.ok()) return step.status();
//     pqcached::Status status = step->Attend(0, query.OnGpu(), output, lse);  // per layer
//     if (status.ok()) status = step->End({&rows, 1});  // a step that has failed is abandoned
#ifndef PQCACHED_GPU_HPP_
#define PQCACHED_GPU_HPP_

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "pqcached/client.hpp"
#include "pqcached/gpu.h"

namespace pqcached {

// Options of Gpu::Open, with the meaning, limits and defaults (0) of pqc_gpu_options.
struct GpuOptions {
  int32_t device = 0;
  uint32_t sequence_capacity = 0;
  uint64_t token_capacity = 0;  // required
  uint64_t selected_capacity = 0;
  uint32_t query_length = 0;
  uint32_t segment_capacity = 0;
  uint32_t codebook_capacity = 0;
  bool block_cache = true;
  uint32_t cache_tokens = 0;
  uint32_t max_block_loads = 0;
  pqc_gpu_policy policy = PQC_GPU_FREQUENCY;
  Index index = {};
  std::string gpu_library_path = {};
  uint64_t codes_bytes = 0;
};

// A device with memory reserved for steps of one cache (pqc_gpu).
class Gpu {
 public:
  // Reserves device memory for the cache (pqc_gpu_open). PQC_FAILED_PRECONDITION and
  // PQC_UNIMPLEMENTED say that the device cannot be used: Client::BeginStep computes on the CPU.
  static Result<Gpu> Open(const Cache& cache, const GpuOptions& options) {
    pqc_gpu_options c = PQC_INIT(pqc_gpu_options);
    c.device = options.device;
    c.sequence_capacity = options.sequence_capacity;
    c.token_capacity = options.token_capacity;
    c.selected_capacity = options.selected_capacity;
    c.query_length = options.query_length;
    c.segment_capacity = options.segment_capacity;
    c.codebook_capacity = options.codebook_capacity;
    c.disable_block_cache = options.block_cache ? 0 : 1;
    c.cache_tokens = options.cache_tokens;
    c.max_block_loads = options.max_block_loads;
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

  // Takes ownership of a handle of the C ABI.
  static Gpu Adopt(pqc_gpu* handle) { return Gpu(handle); }

  // Returns the counters of the block cache and of memory (pqc_gpu_count). Any thread.
  Result<pqc_gpu_counts> Count() const {
    pqc_gpu_counts counts = PQC_INIT(pqc_gpu_counts);
    const pqc_status status = pqc_gpu_count(handle_.get(), &counts);
    if (status != PQC_OK) return Status(status);
    return counts;
  }

  // Stores the rows of prefill tokens of one layer: keys [tokens, kv_heads, key_dim] and values
  // [tokens, kv_heads, value_dim] on the device, contiguous or paged. `stream`, a cudaStream_t,
  // packs them; the call returns when that is launched, and the rows are stored in the background.
  // Sequence::Flush waits for that, and returns its error. `names`: of any tokens of the sequence
  // (pqc_gpu_ingest_with).
  Status Ingest(Sequence& sequence, uint32_t layer, uint64_t first_position, const Tensor& keys,
                const Tensor& values, void* stream, const TokenNames& names = {}) {
    const pqc_tensor k = keys.c();
    const pqc_tensor v = values.c();
    const pqc_row_options options = names.c();
    return Status(pqc_gpu_ingest_with(handle_.get(), sequence.get(), layer, first_position, &k, &v,
                                      &options, stream));
  }

  // Adds queries on the device, as Sequence::AddQuerySamples; waits until `stream` has packed them
  // (pqc_gpu_add_query_samples).
  Status AddQuerySamples(Sequence& sequence, std::span<const QuerySamples> samples, void* stream) {
    std::vector<pqc_query_samples> c;
    for (const QuerySamples& each : samples) c.push_back(each.c());
    return Status(pqc_gpu_add_query_samples(handle_.get(), sequence.get(), c.data(),
                                            static_cast<uint32_t>(c.size()), stream));
  }

  // Begins a step whose work is launched on `stream`, a cudaStream_t. Its Attend, AttendRange,
  // AttendPositions, Decode and End take tensors and spans on the device; for positions and pages,
  // Gpu::TopK and Gpu::TopKPages. timeout_ms: deadline of the step's waits, in milliseconds; 0 =
  // the client's. flags: a sum of PQC_STEP_SELECT_PER_TOKEN and PQC_STEP_DECODES, which Decode
  // needs (pqc_gpu_step_begin).
  Result<Step> BeginStep(std::span<const StepItem> items, const Selection& selection, void* stream,
                         uint32_t timeout_ms = 0, uint64_t flags = 0) {
    return BeginStep(Step::BeginArguments(items, &selection, timeout_ms, flags), stream);
  }

  // Begins a step without a selection, for calls that take none: AttendRange and
  // AttendPositions (pqc_gpu_step_begin).
  Result<Step> BeginStep(std::span<const StepItem> items, void* stream, uint32_t timeout_ms = 0) {
    return BeginStep(Step::BeginArguments(items, nullptr, timeout_ms), stream);
  }

  // Selects tokens in one layer of a step of BeginStep: queries [query tokens of all items,
  // query_heads, key_dim], positions [items, kv_heads, stride], ascending, and counts [items,
  // kv_heads], all on the device; with PQC_STEP_SELECT_PER_TOKEN, [query tokens of all items,
  // kv_heads, stride] and [query tokens of all items, kv_heads]. The stride is at least
  // selected_capacity, in elements (pqc_gpu_step_topk).
  static Status TopK(Step& step, uint32_t layer, const Tensor& queries,
                     std::span<uint32_t> positions, uint64_t stride, std::span<uint32_t> counts) {
    const pqc_tensor q = queries.c();
    pqc_gpu_positions out = PQC_INIT(pqc_gpu_positions);
    out.positions = positions.data();
    out.stride = stride;
    out.counts = counts.data();
    return Status(pqc_gpu_step_topk(step.handle_.get(), layer, &q, &out));
  }

  // Selects pages in one layer of a step of BeginStep: queries as in TopK, pages [items, list
  // count, capacity], each list ascending, then -1, and lengths [items], all on the device. Returns
  // the capacity that the step needs; without pages it writes nothing else (pqc_step_topk_pages).
  static Result<uint32_t> TopKPages(Step& step, uint32_t layer, const Tensor& queries,
                                    const PageOptions& options, std::span<int32_t> pages,
                                    uint32_t capacity, std::span<uint32_t> lengths) {
    const pqc_tensor q = queries.c();
    const pqc_page_options o = options.c();
    pqc_step_pages out = PQC_INIT(pqc_step_pages);
    out.pages = pages.data();
    out.capacity = capacity;
    out.lengths = lengths.data();
    const pqc_status status = pqc_step_topk_pages(step.handle_.get(), layer, &q, nullptr, &o, &out);
    if (status != PQC_OK) return Status(status);
    return out.needed;
  }

  // Merges the partial attention `other` into `a`, both on the device (Tensor::OnGpu), as
  // AttentionMemory::Merge does on the host. `stream`, a cudaStream_t, does the work; the call
  // returns when that is launched. `sink_logits`: on the device too (pqc_gpu_merge_tensors).
  Status Merge(const AttentionMemory& a, const AttentionMemory& other, void* stream,
               const Tensor* sink_logits = nullptr) {
    pqc_partial into = a.c();
    const pqc_partial from = other.c();
    const pqc_tensor sinks = sink_logits ? sink_logits->c() : pqc_tensor{};
    if (sink_logits) into.sink_logits = &sinks;
    return Status(pqc_gpu_merge_tensors(handle_.get(), &into, &from, stream));
  }

 private:
  struct Closer {
    void operator()(pqc_gpu* gpu) const { pqc_gpu_close(gpu); }
  };

  explicit Gpu(pqc_gpu* handle) : handle_(handle) {}

  Result<Step> BeginStep(const Step::BeginArguments& terms, void* stream) {
    pqc_step* step = nullptr;
    const size_t item_count = terms.items.size();
    const pqc_status status =
        pqc_gpu_step_begin(handle_.get(), terms.items.data(), static_cast<uint32_t>(item_count),
                           &terms.options, stream, &step);
    if (status != PQC_OK) return Status(status);
    return Step(step, item_count);
  }

  std::unique_ptr<pqc_gpu, Closer> handle_;
};

}  // namespace pqcached

#endif  // PQCACHED_GPU_HPP_

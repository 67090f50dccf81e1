// Steps is the interface through which libpqcached_client uses libpqcached_gpu. It runs decode
// steps over all layers of one cache on one device: select tokens, look rows up in the block
// caches, read the missing rows, attend. The engine's stream orders all of this work.
//
// The client loads libpqcached_gpu at run time, so that it needs no CUDA itself. No memory changes
// its owner across this interface, no standard-library type crosses it, and nothing throws. Both
// libraries must have the same kStepsVersion, which is incremented with every change of this file
// or of a struct that it includes. The header names no CUDA types and compiles without nvcc.
//
// A *seat* is the place of a sequence on the device across steps: its codes and its blocks in the
// caches. The data that a step needs about sequences (addresses of rows, candidates, k) is written
// to device tables between steps. Select and Attend can therefore be captured in a CUDA graph: they
// launch the same work in every step of the same query length, for any batch; where query tokens
// select for themselves, that work is the work of one token for each of them.
//
// Thread-compatible: one step at a time.
#ifndef PQCACHED_GPU_STEPS_H_
#define PQCACHED_GPU_STEPS_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "gpu/status.h"
#include "kernels/base/dtype.h"
#include "kernels/base/group_rule.h"
#include "kernels/cuda/block_cache.h"
#include "kernels/cuda/merge.h"
#include "kernels/select/head_rule.h"
#include "kernels/select/pq.h"

namespace pqcached::gpu {

inline constexpr uint32_t kStepsVersion = 15;
inline constexpr char kGpuEntrySymbol[] = "pqcached_gpu_entry";

// Tokens of an item, stored or not, whose rows Begin takes from the host for Decode.
inline constexpr uint32_t kRecentCapacity = 64;

// A Status in a form that can cross the library boundary. Longer messages are truncated.
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

// Tokens that Select and Attend take in a layer.
enum class StepLayerKind : uint8_t {
  kSelected,  // k candidates, by an index
  kFull,      // all candidates; no index, and not for Select
  kWindow,    // none, likewise
};

// Shapes of all layers of a cache, and the capacities reserved for steps. Capacities determine
// launches and memory.
struct StepsOptions {
  int device = 0;
  uint32_t layer_count = 0;
  const StepLayerKind* layer_kinds = nullptr;  // [layer_count], read by open; null: kSelected
  const uint32_t* layer_windows = nullptr;  // [layer_count], read by open: tokens of the window of
                                            // layers of kind kWindow; null: Decode has none of them
  kernels::DType dtype = kernels::DType::kF16;
  uint32_t key_dim = 0;
  uint32_t value_dim = 0;
  uint32_t kv_heads = 0;
  uint32_t group_size = 0;
  float scale = 1.0f;
  // Geometry of the index, of no meaning where no layer has one. Codebooks have their own
  // paired_dims.
  kernels::PqGeometry geometry;
  uint32_t sequence_capacity = 0;  // seats
  uint32_t token_capacity = 0;     // tokens of the longest sequence
  uint32_t selected_capacity = 0;  // largest k
  uint32_t query_length = 1;       // longest one, at most 8; times group_size at most 64
  uint32_t span_capacity = 0;      // segments per sequence
  uint32_t codebook_capacity = 0;  // codebooks per sequence
  uint32_t range_capacity = 0;     // candidate ranges per item
  uint32_t cache_tokens = 4096;    // block cache size per sequence and kv head; 0: no cache
  kernels::cuda::CachePolicy policy = kernels::cuda::CachePolicy::kFrequencyAdmission;
  uint32_t max_loads = 32;   // blocks per sequence and kv head loaded after one step
  uint64_t codes_bytes = 0;  // device memory for codes: at least two layers; 0: all layers
};

// The slots of one segment in one layer, in the pool.
struct StepSegment {
  uint32_t first_position = 0;
  uint32_t token_count = 0;
  const std::byte* const* rows = nullptr;  // [kv_heads]: first row of each head
  const uint8_t* planes = nullptr;         // planes of kv head 0; null: not coded yet
  size_t planes_head_stride = 0;           // in bytes
  size_t plane_stride = 0;
  const float* centroids = nullptr;  // centroids of kv head 0
  size_t centroids_head_stride = 0;  // in bytes
  uint32_t codebook_generation = 0;  // with the address it identifies the codebook
  uint32_t paired_dims = 0;          // of the codebook's geometry
};

struct StepRange {
  uint32_t begin = 0;
  uint32_t end = 0;
};

// One layer of one item of a batch.
struct StepLayer {
  const StepSegment* segments = nullptr;  // ascending, without gaps, from position 0
  uint32_t segment_count = 0;
  uint32_t row_tokens = 0;                // rows of positions below it are final
  uint32_t coded_tokens = 0;              // their codes too; at most row_tokens
  const StepRange* candidates = nullptr;  // ascending, disjoint, coded
  uint32_t candidate_count = 0;           // number of ranges
  uint32_t select_count = 0;              // k, at most the number of candidates
};

// What Decode attends to of one item in addition to the selection, by positions.
struct StepOwn {
  uint32_t query_position = 0;  // of its first query token
  // Rows of positions below it are read in the pool: at least row_end, at most query_position, and
  // row_tokens in each layer.
  uint32_t stored_end = 0;
  // Rows of positions [stored_end, query_position), at most kRecentCapacity, in memory of the host:
  // [layers, kv_heads, tokens, row].
  const std::byte* recent = nullptr;
  // The sink is [0, sink_end), and the window of query token i is [window_begin, query_position +
  // i]. In layers of kind kWindow there is no sink, and the window has the layer's length.
  uint32_t sink_end = 0;
  uint32_t window_begin = 0;
};

struct StepSequence {
  uint64_t sequence = 0;  // id, never reused for another sequence
  uint32_t unchanged_tokens =
      0;  // rows and codes below it have not changed since the sequence's last step
  uint32_t query_begin = 0;  // index of its first query token in packed tensors
  // Rows of positions below it may be read in the step: at most token_capacity, and row_tokens in
  // each layer.
  uint32_t row_end = 0;
  // Candidates in layers of kind full: at most range_capacity, ascending and disjoint.
  const StepRange* candidates = nullptr;
  uint32_t candidate_count = 0;
  StepOwn own = {};  // of steps that decode
  // Tokens that are no candidates, of steps that select: the sink is [0, sink_end), and the window
  // has the query tokens.
  uint32_t sink_end = 0;
  StepRange window = {};
};

struct StepBatch {
  const StepSequence* sequences = nullptr;  // [count], each once
  uint32_t count = 0;
  uint32_t query_length = 1;          // query tokens of every item
  const StepLayer* layers = nullptr;  // [count, layer_count]
  bool selects = true;                // false: no layer has candidates, and codes are not described
  bool selects_per_token = false;     // false: the query tokens of an item share a selection
  bool decodes = false;               // Decode may be called
  // Positions that sink and window do not have: ascending and disjoint, less than range_capacity of
  // them.
  const StepRange* excluded = nullptr;
  uint32_t excluded_count = 0;
  const std::byte* pool = nullptr;  // contains all rows, planes and centroids
  size_t pool_bytes = 0;
  // Its pages may be locked: the sidecar keeps them in place. false: the host reads all rows.
  bool locks_pool = false;
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

// Positions that the engine gives, in device memory: [items, list_count, capacity], in any order,
// repeated ones count once. Elements must be below row_end of their item.
struct StepLists {
  const int32_t* positions = nullptr;
  const uint32_t* lengths = nullptr;  // [items, list_count]; null: a list ends before its first -1
  uint32_t list_count = 1;            // 1: one list for all kv heads of an item; or kv_heads
  uint32_t capacity = 0;              // at most selected_capacity
  // [tokens, kv_heads * group_size, capacity], in place of the queries and the keys: scaled and
  // softcapped logits of the positions, which must then ascend within a list. Null: none.
  const StepQueries* logits = nullptr;
};

// Pages of page_tokens tokens that SelectPages selects, as kernels/cuda/step/pages.h defines them.
// Lists and lengths are device memory.
struct StepPages {
  uint32_t page_tokens = 16;  // 16, 32 or 64
  kernels::HeadRule heads = kernels::HeadRule::kEach;
  bool with_sink = false;
  bool with_window = false;
  int32_t* lists = nullptr;     // [items, kv_heads or 1, capacity]: ascending, then -1
  uint32_t capacity = 0;        // pages of a list
  uint32_t* lengths = nullptr;  // [items]: pages in each list of an item
};

// An element of an argument in device memory that the work of a step left out, because it was out
// of range: one of them, if there were several.
struct StepRefusal {
  enum class Argument : uint32_t {
    kNone,
    kListPosition,  // negative, or not below row_end of its item; or, with logits, the order
    kListLength,    // more than the capacity
    kRange,         // begins behind its end, or ends beyond row_end of its item
    kDecodedKey,    // of Decode: the key of a query token has NaN or infinity
    kDecodedValue,  // likewise
    kPageCapacity,  // an item whose lists have more pages
  };
  Argument argument = Argument::kNone;
  uint32_t layer = 0;
  uint64_t element = 0;  // index in the argument's array
};

// K [tokens, kv_heads, key_dim] and V [tokens, kv_heads, value_dim] of the query tokens of a step.
// Strides are in elements; dimensions are contiguous.
struct StepRows {
  const void* keys = nullptr;
  const void* values = nullptr;
  kernels::DType key_dtype = kernels::DType::kF16;
  kernels::DType value_dtype = kernels::DType::kF16;
  int64_t key_strides[2] = {};  // token, head
  int64_t value_strides[2] = {};
  uint32_t token_count = 0;  // at most sequence_capacity * query_length
};

// K or V of prefill tokens on the device, [tokens, kv_heads, dim], or with a block table [blocks,
// tokens of a block, kv_heads, dim]. Strides are in elements; dimensions are contiguous. `to` and
// the block table lie in the staging ring.
struct StepPackTensor {
  const void* data = nullptr;
  kernels::DType dtype = kernels::DType::kF16;
  kernels::DType packed_dtype = kernels::DType::kF16;
  uint32_t dim = 0;
  uint32_t first_token = 0;  // index in the tensor, or in the sequence that the block table maps
  int64_t block_stride = 0;
  int64_t token_stride = 0;
  int64_t head_stride = 0;
  const int32_t* block_table = nullptr;  // null: no blocks
  uint32_t block_tokens = 0;
  std::byte* to = nullptr;  // [token_count, kv_heads, dim] of packed_dtype; null: nothing is packed
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
  uint64_t locked_bytes = 0;     // page-locked part of the pool
  uint64_t generation = 0;       // grows when graphs must be captured again
  bool has_staged_rows = false;  // some rows cannot be page-locked: the host copies them
  uint32_t resident_layers = 0;  // layers whose codes stay on the device
};

class Steps {
 public:
  // Begins a step, between other steps: copies codes of new tokens to the device, page-locks rows,
  // writes the tables and assigns seats, all ordered by the batch's stream. The memory that the
  // batch points to may be freed when Begin returns, but the pool must stay unchanged until Wait or
  // Close.
  //
  // Waits for the previous step when not all codes are resident.
  //
  // Errors: kInvalid      a field of the batch (the message names it and the limit), or a stream of
  //                       another device
  //         kOutOfMemory  more segments, codebooks or chunks than the capacities allow
  virtual Outcome Begin(const StepBatch& batch) = 0;
  // Waits for the device and unlocks the pool. Must be called before the pool is unmapped.
  virtual Outcome ReleasePool() = 0;

  // Selects tokens, after Begin and on its stream. positions [items, kv_heads, stride], ascending,
  // with stride at least selected_capacity, and counts [items, kv_heads] are device memory; with
  // selects_per_token [items, query tokens, kv_heads, stride], and likewise. May be captured.
  virtual Outcome Select(uint32_t layer, const StepQueries& queries, kernels::GroupRule rule,
                         uint32_t* positions, size_t stride, uint32_t* counts) = 0;
  // Selects pages by the scores of tokens, after Begin and on its stream, in a step whose query
  // tokens share a selection. An item that has more pages than the capacity gets the first ones,
  // and Refused reports it. May be captured: replays have the budgets of their step.
  virtual Outcome SelectPages(uint32_t layer, const StepQueries& queries, kernels::GroupRule rule,
                              const StepPages& pages) = 0;
  // Selects tokens and attends to them, after Begin and on its stream. output [tokens, query heads,
  // value_dim] and lse [tokens, query heads] are device memory and cover the selected rows. May be
  // captured.
  // Errors: kInvalid  also when the stream captures a layer that this step has launched already
  virtual Outcome Attend(uint32_t layer, const StepQueries& queries, kernels::GroupRule rule,
                         float* output, float* lse) = 0;
  // Attends to the rows at the positions of lists, after Begin and on its stream; `output` and
  // `lse` as in Attend. Elements that are out of range are left out, and Refused reports them. May
  // be captured: replays read the lists' contents at that time.
  // Errors: those of Attend
  virtual Outcome AttendPositions(uint32_t layer, const StepQueries& queries,
                                  const StepLists& lists, float* output, float* lse) = 0;
  // Attends to the rows of a range of each item, ranges [items, 2] (begin and end) in device
  // memory, as AttendPositions, but leaves the block caches as they are. Work is launched for the
  // longest item of the step or, in a capture, for token_capacity rows.
  // Errors: those of Attend
  virtual Outcome AttendRanges(uint32_t layer, const StepQueries& queries, const uint64_t* ranges,
                               float* output, float* lse) = 0;
  // Attends to the selected tokens of each item, and to its sink and window, the query tokens
  // included, after Begin of a step that decodes. `rows` are those of the query tokens, whose
  // token_count has no effect; output and lse as in Attend, but lse may be null. Keeps the rows in
  // the cache's dtype. May be captured: replays keep the rows of their step.
  // Errors: those of Attend
  virtual Outcome Decode(uint32_t layer, const StepQueries& queries, const StepRows& rows,
                         kernels::GroupRule rule, float* output, float* lse) = 0;
  // Returns the rows that Decode has kept in one layer: [kv_heads, tokens, row] in memory of the
  // host, with sequence_capacity times query_length (of the options) tokens. Null when no work of
  // the step has decoded the layer. Called after Wait, before the next Begin.
  virtual const void* Kept(uint32_t layer) const = 0;
  // Copies rows of new tokens to the host, between Begin and End. *rows is [kv_heads, token_count,
  // row] in page-locked memory, in the cache's dtype, with [key | value] adjacent. The rows are
  // complete after Wait and valid until the next Begin.
  virtual Outcome Fetch(uint32_t layer, const StepRows& from, const void** rows) = 0;
  // Ends the step and starts updating the block caches from its lookups, on side streams; the host
  // does not wait. The step is over even when an error is returned; then Wait does not cover its
  // work, and the next Begin waits for the device.
  // Errors: kInvalid  the stream captures
  virtual Outcome End() = 0;
  // Waits until the work of the last ended step is done, except for the updates of the block
  // caches.
  virtual Outcome Wait() = 0;
  // Returns an element that the work of the last step refused. Called after Wait, before the next
  // Begin.
  virtual StepRefusal Refused() const = 0;

  // Page-locks the staging ring of a prefill, [slot_count, size_bytes / slot_count], and unlocks
  // the previous one, which must not be packed into any more. The ring must stay mapped until
  // another one is locked, or Close. LockStaging, Pack and WaitPacked may be called concurrently
  // with steps.
  virtual Outcome LockStaging(std::byte* ring, size_t size_bytes, uint32_t slot_count) = 0;
  // Launches the packing of K and V into a slot of the ring.
  // Errors: kInvalid  a pointer or the slot is invalid, or the stream captures
  virtual Outcome Pack(const StepPack& pack, uint32_t slot) = 0;
  // Waits until the slot's last Pack is done. May be called from any thread, concurrently with all
  // other calls.
  virtual Outcome WaitPacked(uint32_t slot) = 0;

  // Waits for pending updates of the block caches and reads the counters. May be called from any
  // thread, concurrently with steps.
  virtual Outcome Count(StepsCounts* counts) = 0;
  // Waits for the device and destroys this object.
  virtual void Close() = 0;

  // Launches a merge of two partial attentions in device memory on `stream`, a cudaStream_t of the
  // device. May be captured; may be called from any thread, in a step or outside, concurrently with
  // all other calls except Close. After kInvalid, *field is the argument that the error is about,
  // "a.output.ptr" for one, in static memory.
  //
  // Errors: kInvalid  a pointer that is not the device's, or a stream of another device
  virtual Outcome Merge(const kernels::cuda::MergeTensorsArgs& merge, void* stream,
                        const char** field) = 0;

 protected:
  ~Steps() = default;
};

class RowLoader;  // load/row_loader.h, to which kStepsVersion applies too

struct GpuEntry {
  uint32_t steps_version;
  Outcome (*open)(const StepsOptions& options, Steps** steps);
  // Opens a loader for the device that has `target`.
  Outcome (*open_loader)(const void* target, RowLoader** loader);
};

}  // namespace pqcached::gpu

#endif  // PQCACHED_GPU_STEPS_H_

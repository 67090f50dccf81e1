// pqcached client: statuses, tensors, options and results of client.hpp.
//
// Plain values. What each field means is said in client.h, where it has the same name.
#ifndef PQCACHED_VALUES_HPP_
#define PQCACHED_VALUES_HPP_

#include <algorithm>
#include <array>
#include <cassert>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "pqcached/client.h"

namespace pqcached {

// Whether a call succeeded, and if not, why: the field and its limit.
class [[nodiscard]] Status {
 public:
  Status() = default;
  // Of a call of the C ABI that this thread has just made.
  explicit Status(pqc_status code) : code_(code) {
    if (code == PQC_OK) return;
    message_ = pqc_last_error();
    field_ = pqc_last_error_field();
    retry_ms_ = pqc_last_error_retry_ms();
  }
  Status(pqc_status code, std::string message) : code_(code), message_(std::move(message)) {}

  bool ok() const { return code_ == PQC_OK; }
  pqc_status code() const { return code_; }
  const std::string& message() const { return message_; }
  // Returns the path of the refused field ("selection.token_ratio"), or "".
  const std::string& field() const { return field_; }
  // Returns after how many milliseconds a repetition may succeed; 0 = it is not worthwhile.
  uint32_t retry_ms() const { return retry_ms_; }
  // "NOT_FOUND: sequence_id: 7 ..."
  std::string ToString() const {
    return ok() ? "OK" : std::string(pqc_status_name(code_)) + ": " + message_;
  }

 private:
  pqc_status code_ = PQC_OK;
  std::string message_;
  std::string field_;
  uint32_t retry_ms_ = 0;
};

// A value, or the status that tells why there is none.
template <class T>
class [[nodiscard]] Result {
 public:
  Result(T value) : value_(std::move(value)) {}
  Result(Status status) : status_(std::move(status)) { assert(!status_.ok()); }

  bool ok() const { return value_.has_value(); }
  const Status& status() const { return status_; }
  // REQUIRES: ok()
  T& operator*() { return (assert(ok()), *value_); }
  const T& operator*() const { return (assert(ok()), *value_); }
  T* operator->() { return (assert(ok()), &*value_); }
  const T* operator->() const { return (assert(ok()), &*value_); }

 private:
  std::optional<T> value_;
  Status status_;
};

// A borrowed array of up to four dimensions. Strides are in elements; none = contiguous, last index
// fastest.
class Tensor {
 public:
  Tensor() = default;
  Tensor(std::span<const float> data, std::initializer_list<uint64_t> shape)
      : Tensor(data.data(), PQC_F32, shape) {}
  Tensor(const void* data, pqc_dtype dtype, std::initializer_list<uint64_t> shape,
         std::initializer_list<int64_t> strides = {})
      : data_(data), dtype_(dtype), has_strides_(strides.size() > 0) {
    // What does not fit becomes a tensor of no dimensions, which every call refuses.
    if (shape.size() > shape_.size() || (has_strides_ && strides.size() != shape.size())) return;
    ndim_ = static_cast<uint32_t>(shape.size());
    std::copy(shape.begin(), shape.end(), shape_.begin());
    std::copy(strides.begin(), strides.end(), strides_.begin());
  }

  // Rows of a paged engine: `block_memory` is [blocks, block_tokens, heads, dim], and token t lies in
  // block blocks[t / block_tokens]. Borrows `blocks`.
  static Tensor Paged(Tensor block_memory, std::span<const uint32_t> blocks, uint64_t token_count) {
    Tensor tensor = block_memory;
    tensor.block_table_ = PQC_INIT(pqc_block_table);
    tensor.block_table_.blocks = blocks.data();
    tensor.block_table_.block_count = blocks.size();
    tensor.block_table_.block_tokens = static_cast<uint32_t>(block_memory.shape_[1]);
    tensor.block_table_.token_count = token_count;
    tensor.is_paged_ = true;
    return tensor;
  }

  // The same where `data` is memory of a GPU (gpu.hpp).
  Tensor OnGpu() const {
    Tensor tensor = *this;
    tensor.device_ = PQC_CUDA;
    return tensor;
  }

  uint64_t dim(uint32_t index) const { return shape_[index]; }
  uint32_t ndim() const { return ndim_; }
  // Borrows from this object.
  pqc_tensor c() const {
    pqc_tensor tensor = PQC_INIT(pqc_tensor);
    tensor.ptr = const_cast<void*>(data_);
    tensor.device = device_;
    tensor.dtype = dtype_;
    tensor.ndim = ndim_;
    tensor.shape = shape_.data();
    tensor.strides = has_strides_ ? strides_.data() : nullptr;
    tensor.block_table = is_paged_ ? &block_table_ : nullptr;
    return tensor;
  }

 private:
  const void* data_ = nullptr;
  pqc_device device_ = PQC_CPU;
  pqc_dtype dtype_ = PQC_F32;
  uint32_t ndim_ = 0;
  std::array<uint64_t, 4> shape_{};
  std::array<int64_t, 4> strides_{};
  bool has_strides_ = false;
  bool is_paged_ = false;
  pqc_block_table block_table_{};
};

struct Index : pqc_index {
  Index() : pqc_index{} {}
  static Index Pq(uint32_t subspaces, uint32_t bits) {
    Index index;
    index.kind = PQC_INDEX_PQ;
    index.subspaces = subspaces;
    index.bits = bits;
    return index;
  }
  static Index Flat() {
    Index index;
    index.kind = PQC_INDEX_FLAT;
    return index;
  }
};

// Here and below each member has an initializer, so that designated ones may leave it out without a
// warning.
struct ClientOptions {
  std::string endpoint = {};
  std::string tenant = {};       // empty = what the sidecar knows the process by, or "default"
  std::string client_name = {};  // empty = the program's name
  uint32_t timeout_ms = 0;
  std::string rpc_library_path = {};
  pqc_path_choice path = PQC_PATH_ANY;
  uint32_t thread_count = 0;  // of the local path; 0 = all cores
  // Instead of threads of the client's own: runs body(i) for each i < count, in any order.
  pqc_parallel_for parallel_for = nullptr;
  void* parallel_for_context = nullptr;
  uint64_t staging_slot_bytes = 0;
  uint32_t staging_slot_count = 0;
};

struct LayerGroup {
  pqc_layer_kind kind = PQC_LAYERS_SELECTED;
  std::vector<uint32_t> layers = {};
  uint32_t kv_heads = 0;
  uint32_t query_heads = 0;
  uint32_t key_dim = 0;
  uint32_t value_dim = 0;
  pqc_dtype dtype = PQC_F16;
  float softmax_scale = 0;
  float softcap = 0;
};

struct CacheSpec {
  std::string name = {};
  std::string model_fingerprint = {};
  std::vector<LayerGroup> groups = {};
  uint64_t capacity_bytes = 0;
  Index default_index = {};
  // Of a model that spans several processes; empty = one process.
  std::string rank_group = {};
  uint32_t rank = 0;
  uint32_t rank_count = 0;
  uint32_t kv_head_begin = 0;
  uint32_t layer_begin = 0;
};

// What a prompt is known by, for shared prefixes.
struct Prompt {
  std::vector<uint32_t> token_ids = {};
  std::string extra_key = {};
};

struct LiveIndex {
  Index index = {};
  uint32_t iterations = 0;
  uint64_t seed = 0;
  uint64_t train_tokens = 0;
  uint64_t sink_tokens = 0;
};

struct SequenceOptions {
  Prompt prompt = {};
  std::optional<LiveIndex> live = {};  // an index that is kept up while rows arrive
  // Ties it to those of other ranks (pqc_sequence_options); at most 64 bytes.
  std::string group_key = {};
};

// New tokens of one layer: keys [tokens, kv_heads, key_dim], values [tokens, kv_heads, value_dim].
struct LayerRows {
  uint32_t layer = 0;
  Tensor keys = {};
  Tensor values = {};
};

struct BuildOptions {
  Index index = {};
  uint32_t iterations = 0;
  uint64_t seed = 0;
  uint64_t train_tokens = 0;
  uint64_t sink_tokens = 0;
  uint32_t timeout_ms = 0;
  // Returns false to cancel; must not throw.
  std::function<bool(const pqc_build_progress&)> progress = {};
};

struct Query {
  uint32_t layer = 0;
  uint64_t query_position = 0;
  Tensor queries = {};  // [query_heads, key_dim] or [query_length, query_heads, key_dim]
};

struct Selection {
  Index index = {};
  pqc_group_rule rule = PQC_SUM_SOFTMAX;
  uint64_t sink_tokens = 0;
  uint64_t window_tokens = 0;
  std::vector<pqc_token_range> excluded = {};
  double ratio = 0.1;        // of the context; counts sink, window and selected
  uint64_t token_count = 0;  // instead of `ratio`, when not 0
};

struct Selected {
  uint32_t kv_heads = 0;
  uint32_t count = 0;                    // per kv head
  std::vector<uint32_t> positions = {};  // [kv_heads, count], ascending per kv head
  uint64_t sink_tokens = 0;
  uint64_t window_tokens = 0;
};

// A partial attention: o [query_length, query_heads, value_dim] and the natural log of the sum of
// exponentials [query_length, query_heads].
struct Attention {
  std::vector<float> output = {};
  std::vector<float> lse = {};
  Selected selected = {};  // without positions

  // Makes this the attention over both token sets, which have to be disjoint. REQUIRES: the same
  // shapes.
  void Merge(const Attention& other) {
    assert(output.size() == other.output.size() && lse.size() == other.lse.size());
    const auto rows = static_cast<uint32_t>(lse.size());
    if (rows == 0) return;
    pqc_merge(rows, static_cast<uint32_t>(output.size()) / rows, output.data(), lse.data(),
              other.output.data(), other.lse.data());
  }
};

struct Scores {
  std::vector<float> logits = {};   // [query_heads, tokens]
  std::vector<float> max = {};      // [query_heads]
  std::vector<float> sum_exp = {};  // [query_heads]
};

}  // namespace pqcached

#endif  // PQCACHED_VALUES_HPP_

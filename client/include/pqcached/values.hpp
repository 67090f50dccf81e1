// pqcached client: statuses, tensors, options and results of client.hpp.
//
// Plain values. The meaning, unit and limits of each field are written in client.h, where it has
// the same name; a field that is left out has the default of client.h. Statuses are those of the
// table in status.h. Not synchronised: one thread at a time, or only reads.
//
// Example, which describes 4096 tokens of the fp16 K of a paged engine, in blocks of 16:
//
//     // [blocks, block_tokens, kv_heads, dim]
//     const pqcached::Tensor block_memory(k, PQC_F16, {1024, 16, 8, 128});
//     const auto keys = pqcached::Tensor::Paged(block_memory, block_table, /*token_count=*/4096);
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

// Outcome of a call: a status code and, when it failed, the reason, the refused field and the retry
// time (convention 3 of client.h).
class [[nodiscard]] Status {
 public:
  // Success.
  Status() = default;
  // Takes the code that a call of the C ABI has returned to this thread, and its pqc_last_error,
  // pqc_last_error_field and pqc_last_error_retry_ms. No other call may lie between.
  explicit Status(pqc_status code) : code_(code) {
    if (code == PQC_OK) return;
    message_ = pqc_last_error();
    field_ = pqc_last_error_field();
    retry_ms_ = pqc_last_error_retry_ms();
  }
  Status(pqc_status code, std::string message) : code_(code), message_(std::move(message)) {}
  Status(pqc_status code, std::string field, const std::string& text)
      : code_(code), message_(field + ": " + text), field_(std::move(field)) {}

  bool ok() const { return code_ == PQC_OK; }
  // Returns the code; the table in status.h says what the caller can do about it.
  pqc_status code() const { return code_; }
  // Returns the reason, for people to read; empty on success.
  const std::string& message() const { return message_; }
  // Returns the path of the refused field ("selection.ratio"), or "".
  const std::string& field() const { return field_; }
  // Returns after how many milliseconds a repetition may succeed; 0 = it is not worthwhile.
  uint32_t retry_ms() const { return retry_ms_; }
  // Returns code and reason as text: "OK", "NOT_FOUND: sequence_id: 7 ...".
  std::string ToString() const {
    return ok() ? "OK" : std::string(pqc_status_name(code_)) + ": " + message_;
  }

 private:
  pqc_status code_ = PQC_OK;
  std::string message_;
  std::string field_;
  uint32_t retry_ms_ = 0;
};

// A value, or the status of the call that could not return one.
template <class T>
class [[nodiscard]] Result {
 public:
  Result(T value) : value_(std::move(value)) {}
  Result(Status status) : status_(std::move(status)) { assert(!status_.ok()); }

  bool ok() const { return value_.has_value(); }
  // Returns OK when there is a value.
  const Status& status() const { return status_; }
  // Accesses the value. REQUIRES: ok()
  T& operator*() { return (assert(ok()), *value_); }
  const T& operator*() const { return (assert(ok()), *value_); }
  T* operator->() { return (assert(ok()), &*value_); }
  const T* operator->() const { return (assert(ok()), &*value_); }

 private:
  std::optional<T> value_;
  Status status_;
};

// A borrowed array of up to four dimensions (pqc_tensor). Strides are in elements; none =
// contiguous, last index fastest. The memory must stay until the call that it is passed to returns.
class Tensor {
 public:
  Tensor() = default;
  // An fp32 array, contiguous. `data` must hold as many elements as `shape` says; not checked.
  Tensor(std::span<const float> data, std::initializer_list<uint64_t> shape)
      : Tensor(data.data(), PQC_F32, shape) {}
  // An array of any dtype; `data` is its element with index 0 in every dimension.
  Tensor(const void* data, pqc_dtype dtype, std::initializer_list<uint64_t> shape,
         std::initializer_list<int64_t> strides = {})
      : data_(data), dtype_(dtype), has_strides_(strides.size() > 0) {
    // A wrong number of dimensions gives a tensor of none, which every call refuses.
    if (shape.size() > shape_.size() || (has_strides_ && strides.size() != shape.size())) return;
    ndim_ = static_cast<uint32_t>(shape.size());
    std::copy(shape.begin(), shape.end(), shape_.begin());
    std::copy(strides.begin(), strides.end(), strides_.begin());
  }

  // Returns a paged tensor (pqc_block_table): `block_memory` is [blocks, block_tokens, kv_heads,
  // dim], and token t is stored in block blocks[t / block_tokens]. Borrows `blocks`.
  // The call's tokens are `token_count` of the table from `first_token` on.
  static Tensor Paged(Tensor block_memory, std::span<const uint32_t> blocks, uint64_t token_count,
                      uint64_t first_token = 0) {
    Tensor tensor = PagedMemory(block_memory, token_count);
    tensor.block_table_.blocks = blocks.data();
    tensor.block_table_.block_count = blocks.size();
    tensor.block_table_.first_token = first_token;
    return tensor;
  }
  // Returns a paged tensor by a slot mapping: token t is at index slots[t] % block_tokens of block
  // slots[t] / block_tokens. Borrows `slots`.
  static Tensor PagedSlots(Tensor block_memory, std::span<const int64_t> slots) {
    Tensor tensor = PagedMemory(block_memory, slots.size());
    tensor.block_table_.slots = slots.data();
    return tensor;
  }

  // Returns the same tensor with device PQC_CUDA: `data` is memory of a GPU (gpu.hpp). `stream`, a
  // cudaStream_t, is the stream of a Load; other calls have an argument for it.
  Tensor OnGpu(void* stream = nullptr) const {
    Tensor tensor = *this;
    tensor.device_ = PQC_CUDA;
    tensor.stream_ = stream;
    return tensor;
  }

  // Returns the size of dimension `index`. REQUIRES: index < 4; 0 beyond ndim().
  uint64_t dim(uint32_t index) const { return shape_[index]; }
  uint32_t ndim() const { return ndim_; }
  // Returns the tensor for the C ABI, which borrows shape, strides and block table from this
  // object.
  pqc_tensor c() const {
    pqc_tensor tensor = PQC_INIT(pqc_tensor);
    tensor.ptr = const_cast<void*>(data_);
    tensor.device = device_;
    tensor.dtype = dtype_;
    tensor.ndim = ndim_;
    tensor.shape = shape_.data();
    tensor.strides = has_strides_ ? strides_.data() : nullptr;
    tensor.block_table = is_paged_ ? &block_table_ : nullptr;
    tensor.stream = stream_;
    return tensor;
  }

 private:
  static Tensor PagedMemory(const Tensor& block_memory, uint64_t token_count) {
    Tensor tensor = block_memory;
    tensor.block_table_ = PQC_INIT(pqc_block_table);
    tensor.block_table_.block_tokens = static_cast<uint32_t>(block_memory.shape_[1]);
    tensor.block_table_.token_count = token_count;
    tensor.is_paged_ = true;
    return tensor;
  }

  const void* data_ = nullptr;
  pqc_device device_ = PQC_CPU;
  void* stream_ = nullptr;
  pqc_dtype dtype_ = PQC_F32;
  uint32_t ndim_ = 0;
  std::array<uint64_t, 4> shape_{};
  std::array<int64_t, 4> strides_{};
  bool has_strides_ = false;
  bool is_paged_ = false;
  pqc_block_table block_table_{};
};

// A parameter of Index::Make (pqc_index_parameter): a number, or a name.
struct IndexParameter {
  IndexParameter(std::string parameter, uint64_t value)
      : name(std::move(parameter)), number(value) {}
  IndexParameter(std::string parameter, std::string value)
      : name(std::move(parameter)), value_name(std::move(value)) {}

  std::string name;
  std::string value_name;  // empty: `number`
  uint64_t number = 0;
};

// An index kind with its parameters (pqc_index); by default that of the CacheSpec.
struct Index : pqc_index {
  Index() : pqc_index{} {}
  // Product quantization with `subspaces` (m, at most key_dim / 2) of `bits` (b: 1..8) bits each.
  static Index Pq(uint32_t subspaces, uint32_t bits,
                  pqc_subspace_layout layout = PQC_SUBSPACES_PAIRS) {
    Index index;
    index.kind = PQC_INDEX_PQ;
    index.subspaces = subspaces;
    index.bits = bits;
    index.reserved[PQC_INDEX_LAYOUT] = layout;
    return index;
  }
  // Exact scores over all keys.
  static Index Flat() {
    Index index;
    index.kind = PQC_INDEX_FLAT;
    return index;
  }
  // An index of a type by name, Make("pq", {{"subspaces", 4}, {"layout", "contiguous"}});
  // parameters that are not given have their defaults (pqc_index_make).
  static Result<Index> Make(const std::string& type,
                            const std::vector<IndexParameter>& parameters = {}) {
    const std::vector<pqc_index_parameter> c = InC(parameters);
    Index index;
    index.struct_size = sizeof(pqc_index);
    const pqc_status status =
        pqc_index_make(type.c_str(), c.data(), static_cast<uint32_t>(c.size()), &index);
    if (status != PQC_OK) return Status(status);
    return index;
  }

 private:
  friend class Client;
  static std::vector<pqc_index_parameter> InC(const std::vector<IndexParameter>& parameters) {
    std::vector<pqc_index_parameter> c;
    for (const IndexParameter& parameter : parameters) {
      const bool is_named = !parameter.value_name.empty();
      c.push_back({sizeof(pqc_index_parameter), parameter.name.c_str(),
                   is_named ? parameter.value_name.c_str() : nullptr, parameter.number});
    }
    return c;
  }
};

// Options of Client::Open (pqc_client_options). Here and below each member has an initializer, so
// that designated initializers may leave it out without a warning.
struct ClientOptions {
  std::string endpoint = {};
  std::string tenant = {};       // empty = the broker's tenant for this process, or "default"
  std::string client_name = {};  // empty = the program's name
  uint32_t timeout_ms = 0;       // deadline of each call; 0 = 10000
  std::string rpc_library_path = {};
  pqc_path_choice path = PQC_PATH_ANY;
  uint32_t thread_count = 0;  // threads of the local path; 0 = all cores
  // The engine's thread pool, in place of threads of the client's own: runs body(i) for each
  // i < count, in any order.
  pqc_parallel_for parallel_for = nullptr;
  void* parallel_for_context = nullptr;
  uint64_t staging_slot_bytes = 0;
  uint32_t staging_slot_count = 0;
  // TLS of "host:port": paths of files, as in pqc_client_options; empty = none.
  std::string tls_ca = {};
  std::string tls_certificate = {};
  std::string tls_key = {};
  std::string tls_server_name = {};  // empty = the endpoint's host
  std::string token_file = {};
};

// Layers of one kind and shape (pqc_layer_group).
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
  pqc_rope_layout rope_layout = PQC_ROPE_UNKNOWN;
  double rope_theta = 0;
  uint32_t rotary_dim = 0;
  uint32_t window_tokens = 0;
};

// Description of a cache for Client::OpenCache (pqc_cache_spec).
struct CacheSpec {
  std::string name = {};
  std::string model_fingerprint = {};
  std::vector<LayerGroup> groups = {};
  uint64_t capacity_bytes = 0;  // of the pool; 0: it grows within the tenant's quota
  Index default_index = {};
  // Place of this process in a model that spans several; empty and 0 = a single process.
  std::string rank_group = {};
  uint32_t rank = 0;
  uint32_t rank_count = 0;
  uint32_t kv_head_begin = 0;
  uint32_t layer_begin = 0;
  int32_t numa_node = 0;
  bool prefill_measured = false;  // the sidecar measures prefill_seconds
  // Seconds of the prefill of n tokens in a layer: [0] n^2 + [1] n + [2]; 0 = the sidecar's option.
  std::array<double, 3> prefill_seconds = {};
};

// An engine's name of 128 tokens (pqc_content_key).
using ContentKey = pqc_content_key;

// Identity of a prompt, for shared prefixes: at most 2^22 token ids, or 2^15 content keys in place
// of them, and 256 bytes.
struct Prompt {
  std::vector<uint32_t> token_ids = {};
  std::string extra_key = {};
  std::vector<ContentKey> content_keys = {};
};

// Names of tokens that a call records with the rows that it stores: their ids, or content keys of
// 128 tokens each (pqc_row_options). The memory must stay until the call returns.
struct TokenNames {
  uint64_t begin = 0;  // position of the first named token
  std::span<const uint32_t> token_ids = {};
  std::span<const ContentKey> content_keys = {};

  // Returns the struct of the C ABI.
  pqc_row_options c() const {
    pqc_row_options c = PQC_INIT(pqc_row_options);
    c.names_begin = begin;
    c.token_ids = token_ids.data();
    c.token_id_count = token_ids.size();
    c.content_keys = content_keys.data();
    c.content_key_count = content_keys.size();
    return c;
  }
};

// An index that the sidecar keeps up to date while rows are written (pqc_sequence_options).
struct LiveIndex {
  Index index = {};
  uint32_t iterations = 0;
  uint64_t seed = 0;
  uint64_t train_tokens = 0;
  uint64_t sink_tokens = 0;
};

// Options of Cache::CreateSequence (pqc_sequence_options).
struct SequenceOptions {
  Prompt prompt = {};
  std::optional<LiveIndex> live_index = {};
  // Ties the sequence to those of other ranks (pqc_sequence_options); at most 64 bytes.
  std::string group_key = {};
  uint64_t at_least_tokens = 0;  // of a stored prefix, else PQC_NOT_FOUND
  // Whether named tokens remain as a cached prefix; nothing: as the sidecar's option says.
  std::optional<bool> retain = {};
};

// Rows (KV entries) of new tokens in one layer: keys [tokens, kv_heads, key_dim], values [tokens,
// kv_heads, value_dim].
struct LayerRows {
  uint32_t layer = 0;
  Tensor keys = {};
  Tensor values = {};
};

// Returns the structs of the C ABI, which refer to the tensors of `layers`.
inline std::vector<pqc_layer_rows> LayerRowsToC(std::span<const LayerRows> layers) {
  std::vector<pqc_layer_rows> rows(layers.size(), PQC_INIT(pqc_layer_rows));
  for (size_t i = 0; i < layers.size(); ++i) {
    rows[i].layer = layers[i].layer;
    rows[i].keys = layers[i].keys.c();
    rows[i].values = layers[i].values.c();
  }
  return rows;
}

// Queries [positions, query_heads, key_dim] of stored tokens in one layer (pqc_query_samples).
struct QuerySamples {
  uint32_t layer = 0;
  std::span<const uint64_t> positions = {};
  Tensor queries = {};

  pqc_query_samples c() const {
    auto samples = PQC_INIT(pqc_query_samples);
    samples.layer = layer;
    samples.positions = positions.data();
    samples.position_count = positions.size();
    samples.queries = queries.c();
    return samples;
  }
};

// Options of Sequence::BuildIndex (pqc_build_options).
struct BuildOptions {
  Index index = {};
  uint32_t iterations = 0;
  uint64_t seed = 0;
  uint64_t train_tokens = 0;
  uint64_t sink_tokens = 0;
  uint32_t timeout_ms = 0;
  bool rebuild = false;  // replaces an index that exists when the new one is done
  // Conditions of rebuild; 0 = none: keys that have drifted by this ratio, or so many new tokens.
  double rebuild_drift = 0;
  uint64_t rebuild_tokens = 0;
  // Called on the calling thread after each codebook; returns false to cancel; must not throw.
  std::function<bool(const pqc_build_progress&)> progress = {};
};

// Returns the options in C, for a call that ends before `options` does.
inline pqc_build_options BuildOptionsToC(const BuildOptions& options) {
  pqc_build_options c = PQC_INIT(pqc_build_options);
  c.index = options.index;
  c.iterations = options.iterations;
  c.seed = options.seed;
  c.train_tokens = options.train_tokens;
  c.sink_tokens = options.sink_tokens;
  c.timeout_ms = options.timeout_ms;
  c.rebuild = options.rebuild ? 1 : 0;
  c.rebuild_drift = options.rebuild_drift;
  c.rebuild_tokens = options.rebuild_tokens;
  if (options.progress) {
    c.callback = [](void* context, const pqc_build_progress* progress) {
      return static_cast<const BuildOptions*>(context)->progress(*progress) ? 1 : 0;
    };
    c.callback_context = const_cast<BuildOptions*>(&options);
  }
  return c;
}

// A query of one layer (pqc_query), of one token or of a speculation.
struct Query {
  uint32_t layer = 0;
  uint64_t query_position = 0;
  Tensor queries = {};  // [query_heads, key_dim] or [query_length, query_heads, key_dim]
};

// Terms of a selection (pqc_selection).
struct Selection {
  Index index = {};
  pqc_group_rule group_rule = PQC_SUM_SOFTMAX;
  uint64_t sink_tokens = 0;
  uint64_t window_tokens = 0;
  std::vector<pqc_token_range> excluded = {};
  double ratio = 0.1;        // budget, of the context: counts sink, window and selected tokens
  uint64_t token_count = 0;  // budget in tokens, in place of `ratio`, when not 0
  // Budget of selected tokens alone, in place of both, when not 0 (PQC_BUDGET_RETRIEVED).
  uint64_t retrieved_tokens = 0;
  double rerank_factor = 0;  // in [1, 8]: of k, candidates that are scored exactly; 0 = off
  // Budget by the share of the attention, in (0, 1], in place of `ratio`, when not 0
  // (PQC_BUDGET_MASS), and its bounds of selected tokens; not with the two counts above.
  double attention_mass = 0;
  uint64_t least_tokens = 0, most_tokens = 0;
  bool tail_estimate = false;  // attention estimates the other candidates by an index of clusters

  // Returns the C struct, which refers to `excluded`.
  pqc_selection c() const {
    pqc_selection c = PQC_INIT(pqc_selection);
    c.index = index;
    c.group_rule = group_rule;
    c.sink_tokens = sink_tokens;
    c.window_tokens = window_tokens;
    c.excluded = excluded.data();
    c.excluded_count = static_cast<uint32_t>(excluded.size());
    c.budget = retrieved_tokens      ? PQC_BUDGET_RETRIEVED
               : token_count         ? PQC_BUDGET_COUNT
               : attention_mass != 0 ? PQC_BUDGET_MASS
                                     : PQC_BUDGET_RATIO;
    c.ratio = ratio;
    c.token_count = retrieved_tokens ? retrieved_tokens : token_count;
    c.rerank_factor = rerank_factor;
    c.attention_mass = attention_mass;
    c.least_tokens = least_tokens;
    c.most_tokens = most_tokens;
    c.tail_estimate = tail_estimate ? 1 : 0;
    return c;
  }
};

// Selected tokens (pqc_positions).
struct Selected {
  uint32_t kv_heads = 0;                 // with PQC_PER_QUERY_HEAD the query_heads
  uint32_t count = 0;                    // k, per set
  std::vector<uint32_t> positions = {};  // [kv_heads, count], ascending per set
  uint64_t sink_tokens = 0;              // sink tokens that the engine attends itself
  uint64_t window_tokens = 0;            // window tokens that the engine attends itself
};

// A partial attention over some tokens: output [query_length, query_heads, value_dim] and lse
// [query_length, query_heads], the natural log of the sum of exponentials of the scaled logits.
struct Attention {
  std::vector<float> output = {};
  std::vector<float> lse = {};
  Selected selected = {};  // without positions

  // Makes this the attention over both token sets, which must be disjoint (pqc_merge). REQUIRES:
  // the same shapes.
  void Merge(const Attention& other) {
    assert(output.size() == other.output.size() && lse.size() == other.lse.size());
    const auto rows = static_cast<uint32_t>(lse.size());
    if (rows == 0) return;
    pqc_merge(rows, static_cast<uint32_t>(output.size()) / rows, output.data(), lse.data(),
              other.output.data(), other.lse.data());
  }
};

// The engine's memory for a partial attention, of any dtypes and strides: output [query tokens,
// query_heads, value_dim] and lse [query tokens, query_heads] (pqc_attention, pqc_partial). An lse
// in the order [query_heads, query tokens] is a tensor with strides {1, query tokens}.
struct AttentionMemory {
  Tensor output = {};
  Tensor lse = {};
  pqc_log_base lse_base = PQC_LOG_NATURAL;

  // Merges the partial attention `other` of the same shape over a disjoint set of tokens into this
  // one (pqc_merge_tensors). `sink_logits`, [query_heads] or null: the model's learned attention
  // sinks, which are added to the softmax in exactly one of several merges. On a GPU: Gpu::Merge.
  Status Merge(const AttentionMemory& other, const Tensor* sink_logits = nullptr) const {
    pqc_partial a = c();
    const pqc_partial b = other.c();
    const pqc_tensor sinks = sink_logits ? sink_logits->c() : pqc_tensor{};
    if (sink_logits) a.sink_logits = &sinks;
    return Status(pqc_merge_tensors(&a, &b));
  }

  // Returns the C struct, which refers to this object.
  pqc_partial c() const {
    pqc_partial partial = PQC_INIT(pqc_partial);
    partial.output = output.c();
    partial.lse = lse.c();
    partial.lse_base = lse_base;
    return partial;
  }
};

// Logits of the tokens of a range (pqc_score).
struct Scores {
  std::vector<float> logits = {};   // [query_heads, tokens]
  std::vector<float> max = {};      // [query_heads]
  std::vector<float> sum_exp = {};  // [query_heads]
};

}  // namespace pqcached

#endif  // PQCACHED_VALUES_HPP_

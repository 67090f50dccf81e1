// pqcached client: C++20 over the C ABI of client.h, in this header alone.
//
// Client, Cache and Sequence own their handle and move; they may be destroyed in any order. Nothing
// throws but std::bad_alloc: what may fail returns a Status or a Result<T>. Thread-safety,
// deadlines and limits are those of client.h, which also says what each field means.
//
//   auto client = pqcached::Client::Open({.endpoint = "unix:///run/pqcached/pqcached.sock"});
//   if (!client.ok()) return Complain(client.status().message());
#ifndef PQCACHED_CLIENT_HPP_
#define PQCACHED_CLIENT_HPP_

#include <algorithm>
#include <array>
#include <cassert>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <map>
#include <memory>
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
    if (code != PQC_OK) message_ = pqc_last_error();
  }
  Status(pqc_status code, std::string message) : code_(code), message_(std::move(message)) {}

  bool ok() const { return code_ == PQC_OK; }
  pqc_status code() const { return code_; }
  const std::string& message() const { return message_; }
  // "NOT_FOUND: sequence_id: 7 ..."
  std::string ToString() const {
    return ok() ? "OK" : std::string(pqc_status_name(code_)) + ": " + message_;
  }

 private:
  pqc_status code_ = PQC_OK;
  std::string message_;
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

  uint64_t dim(uint32_t index) const { return shape_[index]; }
  uint32_t ndim() const { return ndim_; }
  // Borrows from this object.
  pqc_tensor c() const {
    pqc_tensor tensor = PQC_INIT(pqc_tensor);
    tensor.ptr = const_cast<void*>(data_);
    tensor.dtype = dtype_;
    tensor.ndim = ndim_;
    tensor.shape = shape_.data();
    tensor.strides = has_strides_ ? strides_.data() : nullptr;
    return tensor;
  }

 private:
  const void* data_ = nullptr;
  pqc_dtype dtype_ = PQC_F32;
  uint32_t ndim_ = 0;
  std::array<uint64_t, 4> shape_{};
  std::array<int64_t, 4> strides_{};
  bool has_strides_ = false;
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
  std::string tenant = "default";
  std::string client_name = {};  // empty = the program's name
  uint32_t timeout_ms = 0;
  std::string rpc_library_path = {};
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
  Tensor queries = {};  // [query_heads, key_dim]
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

// A partial attention: o [query_heads, value_dim] and the natural log of the sum of exponentials
// [query_heads].
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

class Sequence {
 public:
  uint64_t id() const { return pqc_sequence_id(handle_.get()); }
  // For calls of the C ABI; still this object's.
  pqc_sequence* get() const { return handle_.get(); }

  Status Ingest(uint32_t layer, uint64_t first_position, const Tensor& keys, const Tensor& values) {
    const pqc_tensor k = keys.c();
    const pqc_tensor v = values.c();
    return Status(pqc_ingest(handle_.get(), layer, first_position, &k, &v));
  }

  // Returns the sequence's tokens.
  Result<uint64_t> Append(uint64_t first_position, std::span<const LayerRows> layers) {
    std::vector<pqc_layer_rows> rows(layers.size(), PQC_INIT(pqc_layer_rows));
    for (size_t i = 0; i < layers.size(); ++i) {
      rows[i].layer = layers[i].layer;
      rows[i].keys = layers[i].keys.c();
      rows[i].values = layers[i].values.c();
    }
    uint64_t token_count = 0;
    const pqc_status status = pqc_append(handle_.get(), first_position, rows.data(),
                                         static_cast<uint32_t>(rows.size()), &token_count);
    if (status != PQC_OK) return Status(status);
    return token_count;
  }

  Status BuildIndex(const BuildOptions& options = {}) {
    pqc_build_options c = PQC_INIT(pqc_build_options);
    c.index = options.index;
    c.iterations = options.iterations;
    c.seed = options.seed;
    c.train_tokens = options.train_tokens;
    c.sink_tokens = options.sink_tokens;
    c.timeout_ms = options.timeout_ms;
    if (options.progress) {
      c.callback = [](void* context, const pqc_build_progress* progress) {
        return static_cast<const BuildOptions*>(context)->progress(*progress) ? 1 : 0;
      };
      c.callback_context = const_cast<BuildOptions*>(&options);
    }
    return Status(pqc_build_index(handle_.get(), &c));
  }

  // Asks twice when the answer is larger than kExpectedPositions.
  Result<Selected> Select(const Query& query, const Selection& selection) {
    const pqc_query q = ToC(query);
    const pqc_selection s = ToC(selection);
    Selected selected;
    pqc_positions out = PQC_INIT(pqc_positions);
    pqc_status status = PQC_OUT_OF_RANGE;
    for (size_t capacity = kExpectedPositions; status == PQC_OUT_OF_RANGE;) {
      selected.positions.resize(capacity);
      out.positions = selected.positions.data();
      out.capacity = capacity;
      status = pqc_select(handle_.get(), &q, &s, &out);
      const size_t needed = size_t{out.kv_heads} * out.count;
      if (status == PQC_OUT_OF_RANGE && needed <= capacity)
        break;  // something else is out of range
      capacity = needed;
    }
    if (status != PQC_OK) return Status(status);
    selected = FromC(out, std::move(selected.positions));
    selected.positions.resize(size_t{out.kv_heads} * out.count);
    return selected;
  }

  Result<Attention> Attend(const Query& query, const Selection& selection) {
    const pqc_query q = ToC(query);
    const pqc_selection s = ToC(selection);
    return Attend(query,
                  [&](pqc_attention* out) { return pqc_attend(handle_.get(), &q, &s, out); });
  }

  // Over given positions, [kv_heads, count].
  Result<Attention> Attend(const Query& query, std::span<const uint32_t> positions,
                           uint32_t count) {
    if (Status status = CheckPositions(query.layer, positions, count); !status.ok()) return status;
    const pqc_query q = ToC(query);
    return Attend(query, [&](pqc_attention* out) {
      return pqc_attend_positions(handle_.get(), &q, positions.data(), count, out);
    });
  }

  Result<Scores> Score(const Query& query, const Index& index, pqc_token_range tokens) {
    const pqc_query q = ToC(query);
    const size_t heads = QueryHeads(query);
    const size_t count = tokens.end > tokens.begin ? tokens.end - tokens.begin : 0;
    Scores scores{std::vector<float>(heads * count), std::vector<float>(heads),
                  std::vector<float>(heads)};
    const pqc_status status =
        pqc_score(handle_.get(), &q, &index, tokens, scores.logits.data(), scores.logits.size(),
                  scores.max.data(), scores.sum_exp.data());
    if (status != PQC_OK) return Status(status);
    return scores;
  }

  // Rows [kv_heads, tokens, dim] of the cache's dtype.
  Status FetchRange(uint32_t layer, pqc_token_range tokens, pqc_row_part part,
                    std::span<std::byte> out) {
    return Status(pqc_fetch_range(handle_.get(), layer, tokens, part, out.data(), out.size()));
  }

  // Rows [kv_heads, count, dim] at positions [kv_heads, count].
  Status FetchTokens(uint32_t layer, std::span<const uint32_t> positions, uint32_t count,
                     pqc_row_part part, std::span<std::byte> out) {
    if (Status status = CheckPositions(layer, positions, count); !status.ok()) return status;
    return Status(pqc_fetch_tokens(handle_.get(), layer, positions.data(), count, part, out.data(),
                                   out.size()));
  }

  Status Truncate(uint64_t token_count) {
    return Status(pqc_sequence_truncate(handle_.get(), token_count));
  }

  Result<pqc_sequence_info> Describe() {
    pqc_sequence_info info = PQC_INIT(pqc_sequence_info);
    const pqc_status status = pqc_sequence_describe(handle_.get(), &info);
    if (status != PQC_OK) return Status(status);
    return info;
  }

  // Drops the sequence now and says how it went; the destructor drops it otherwise.
  Status Drop() { return Status(pqc_sequence_drop(handle_.release())); }

 private:
  friend class Cache;
  struct Dropper {
    void operator()(pqc_sequence* sequence) const { pqc_sequence_drop(sequence); }
  };
  struct Sizes {
    uint32_t kv_heads = 0;
    uint32_t value_dim = 0;
  };
  using SizesByLayer = std::map<uint32_t, Sizes>;

  static constexpr size_t kExpectedPositions = 16384;

  Sequence(pqc_sequence* handle, std::shared_ptr<const SizesByLayer> sizes)
      : handle_(handle), sizes_(std::move(sizes)) {}

  // Zeros for a layer that is not stored: the call itself then names what is wrong.
  Sizes SizesOf(uint32_t layer) const {
    const auto found = sizes_->find(layer);
    return found == sizes_->end() ? Sizes{} : found->second;
  }

  Status CheckPositions(uint32_t layer, std::span<const uint32_t> positions, uint32_t count) const {
    const size_t needed = size_t{SizesOf(layer).kv_heads} * count;
    if (positions.size() >= needed) return {};
    return {PQC_INVALID_ARGUMENT, "positions: " + std::to_string(positions.size()) + ", but " +
                                      std::to_string(needed) + " are needed: [kv_heads, count]"};
  }

  static pqc_query ToC(const Query& query) {
    pqc_query c = PQC_INIT(pqc_query);
    c.layer = query.layer;
    c.query_position = query.query_position;
    c.queries = query.queries.c();
    return c;
  }

  static pqc_selection ToC(const Selection& selection) {
    pqc_selection c = PQC_INIT(pqc_selection);
    c.index = selection.index;
    c.rule = selection.rule;
    c.sink_tokens = selection.sink_tokens;
    c.window_tokens = selection.window_tokens;
    c.excluded = selection.excluded.data();
    c.excluded_count = static_cast<uint32_t>(selection.excluded.size());
    c.budget = selection.token_count ? PQC_BUDGET_COUNT : PQC_BUDGET_RATIO;
    c.ratio = selection.ratio;
    c.token_count = selection.token_count;
    return c;
  }

  static Selected FromC(const pqc_positions& c, std::vector<uint32_t> positions) {
    return {c.kv_heads, c.count, std::move(positions), c.sink_tokens, c.window_tokens};
  }

  static size_t QueryHeads(const Query& query) {
    return query.queries.ndim() < 2 ? 0 : query.queries.dim(query.queries.ndim() - 2);
  }

  template <class CallAttend>
  Result<Attention> Attend(const Query& query, const CallAttend& call) {
    Attention attention;
    attention.lse.resize(QueryHeads(query));
    attention.output.resize(attention.lse.size() * SizesOf(query.layer).value_dim);
    // Even an empty output must not be NULL, so that it is the wrong field that is complained
    // about.
    attention.lse.reserve(1);
    attention.output.reserve(1);
    pqc_attention out = PQC_INIT(pqc_attention);
    out.output = attention.output.data();
    out.output_capacity = attention.output.size();
    out.lse = attention.lse.data();
    out.lse_capacity = attention.lse.size();
    if (const pqc_status status = call(&out); status != PQC_OK) return Status(status);
    attention.selected = FromC(out.selected, {});
    return attention;
  }

  std::unique_ptr<pqc_sequence, Dropper> handle_;
  std::shared_ptr<const SizesByLayer> sizes_;  // shared with its cache, which may go first
};

class Cache {
 public:
  Result<Sequence> CreateSequence() {
    pqc_sequence* sequence = nullptr;
    const pqc_status status = pqc_sequence_create(handle_.get(), &sequence);
    if (status != PQC_OK) return Status(status);
    return Sequence(sequence, sizes_);
  }

 private:
  friend class Client;
  struct Closer {
    void operator()(pqc_cache* cache) const { pqc_cache_close(cache); }
  };

  Cache(pqc_cache* handle, const CacheSpec& spec) : handle_(handle) {
    auto sizes = std::make_shared<Sequence::SizesByLayer>();
    for (const LayerGroup& group : spec.groups) {
      for (const uint32_t layer : group.layers) (*sizes)[layer] = {group.kv_heads, group.value_dim};
    }
    sizes_ = std::move(sizes);
  }

  std::unique_ptr<pqc_cache, Closer> handle_;
  std::shared_ptr<const Sequence::SizesByLayer> sizes_;  // shared with the sequences
};

class Client {
 public:
  static Result<Client> Open(const ClientOptions& options) {
    pqc_client_options c = PQC_INIT(pqc_client_options);
    c.endpoint = options.endpoint.c_str();
    c.tenant = options.tenant.c_str();
    c.client_name = options.client_name.empty() ? nullptr : options.client_name.c_str();
    c.timeout_ms = options.timeout_ms;
    c.rpc_library_path =
        options.rpc_library_path.empty() ? nullptr : options.rpc_library_path.c_str();
    pqc_client* client = nullptr;
    const pqc_status status = pqc_client_open(&c, &client);
    if (status != PQC_OK) return Status(status);
    return Client(client);
  }

  Result<Cache> OpenCache(const CacheSpec& spec) {
    std::vector<pqc_layer_group> groups(spec.groups.size(), PQC_INIT(pqc_layer_group));
    for (size_t i = 0; i < groups.size(); ++i) {
      const LayerGroup& group = spec.groups[i];
      groups[i].kind = group.kind;
      groups[i].layers = group.layers.data();
      groups[i].layer_count = static_cast<uint32_t>(group.layers.size());
      groups[i].kv_heads = group.kv_heads;
      groups[i].query_heads = group.query_heads;
      groups[i].key_dim = group.key_dim;
      groups[i].value_dim = group.value_dim;
      groups[i].dtype = group.dtype;
      groups[i].softmax_scale = group.softmax_scale;
      groups[i].softcap = group.softcap;
    }
    pqc_cache_spec c = PQC_INIT(pqc_cache_spec);
    c.name = spec.name.c_str();
    c.model_fingerprint = spec.model_fingerprint.c_str();
    c.groups = groups.data();
    c.group_count = static_cast<uint32_t>(groups.size());
    c.capacity_bytes = spec.capacity_bytes;
    c.default_index = spec.default_index;
    pqc_cache* cache = nullptr;
    const pqc_status status = pqc_cache_open(handle_.get(), &c, &cache);
    if (status != PQC_OK) return Status(status);
    return Cache(cache, spec);
  }

  // Any unary Admin RPC by name; names of the fields are those of the proto.
  Result<std::string> AdminJson(const std::string& method, const std::string& request = "{}") {
    char* answer = nullptr;
    const pqc_status status =
        pqc_admin_json(handle_.get(), method.c_str(), request.c_str(), &answer);
    if (status != PQC_OK) return Status(status);
    std::string text = answer;
    pqc_free(answer);
    return text;
  }

 private:
  struct Closer {
    void operator()(pqc_client* client) const { pqc_client_close(client); }
  };
  explicit Client(pqc_client* handle) : handle_(handle) {}

  std::unique_ptr<pqc_client, Closer> handle_;
};

}  // namespace pqcached

#endif  // PQCACHED_CLIENT_HPP_

// Value types of the store: the parts of a cache, of a sequence and of a selection. The Validate
// functions check them.
#ifndef PQCACHED_KVSTORE_MODEL_H_
#define PQCACHED_KVSTORE_MODEL_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "kernels/base/dtype.h"
#include "kvstore/read/layer_view.h"
#include "kvstore/read/layout.h"
#include "kvstore/read/selection.h"

namespace pqcached::kvstore {

// Limits of CacheSpec::name and rank.group, and of CacheSpec::model_fingerprint.
inline constexpr size_t kMaxNameBytes = 128;
inline constexpr size_t kMaxFingerprintBytes = 256;

// Rotary position embedding of the keys. Part of a cache's identity. Sub-spaces of pq indexes keep
// the pairs of layout kHalf together.
struct Rope {
  static constexpr uint8_t kHalf = 2;  // pairs (i, i + rotary_dim / 2)
  uint8_t layout = 0;                  // numbered as in the proto
  double theta = 0;
  uint32_t rotary_dim = 0;
  friend bool operator==(const Rope&, const Rope&) = default;
};

// Layers of one kind and shape.
struct LayerGroup {
  LayerKind kind = LayerKind::kSelected;
  // Absolute layer numbers, ascending, < kMaxLayers; no layer is in two groups.
  std::vector<uint32_t> layers;
  uint32_t kv_heads = 0;  // 1..kMaxKvHeads; the following fields are ignored for kNone
  // A multiple of kv_heads, at most kMaxQueryHeads, and at most kMaxGroupSize per kv head.
  uint32_t query_heads = 0;
  // kMinHeadDim..kMaxHeadDim, a multiple of kHeadDimMultiple; 0 for kValues.
  uint32_t key_dim = 0;
  uint32_t value_dim = 0;  // same limits as key_dim
  kernels::DType dtype = kernels::DType::kF16;
  float softmax_scale = 0;  // 0 = 1 / sqrt(key_dim)
  float softcap = 0;        // 0 = none
  Rope rope = {};
  // kWindow: at least 1, the tokens to which a query attends; 0 for the other kinds. Rows of
  // earlier tokens are stored as well.
  uint32_t window_tokens = 0;

  uint32_t group_size() const { return query_heads / kv_heads; }
  uint32_t row_bytes() const;
  float scale() const;
};

// Part of a model that runs in several processes: each rank opens its own cache, all under one
// name. Ranks of a group agree on model_fingerprint and rank_count; no two of them share a (layer,
// kv head).
struct Rank {
  std::string group;  // at most 128 bytes; empty = a single process, and all other fields are 0
  uint32_t rank = 0;
  uint32_t rank_count = 0;  // 1..1024
  // First kv head of this rank, in every layer; all its kv heads are < kMaxKvHeads.
  uint32_t kv_head_begin = 0;
  uint32_t layer_begin = 0;  // lower bound of this rank's layers (absolute numbers)
  friend bool operator==(const Rank&, const Rank&) = default;
};

// The content of a cache: rows of sequences, or pages under keys (pages/keyed_pages.h).
enum class CacheKind : uint8_t { kRows = 0, kPages = 1 };

// Time of an engine's prefill of one layer, a quadratic in the tokens (PQCache, SIGMOD 2025,
// section 3.3, equation 2); the layer's keys may be clustered in this time. All 0: not known.
struct PrefillCost {
  double seconds_per_token_squared = 0;
  double seconds_per_token = 0;
  double seconds = 0;
};

// An engine's report of that time.
struct PrefillReport {
  bool measured = false;  // from the arrival of the chunks of prefills; `cost` is then all 0
  PrefillCost cost = {};
};

// A page cache has only name, capacity_bytes, quota_bytes and `kind`.
struct CacheSpec {
  std::string name;  // 1..128 bytes
  // 1..256 bytes; identifies everything that changes K and V: weights revision, RoPE scaling,
  // adapters.
  std::string model_fingerprint;
  std::vector<LayerGroup> groups;
  // Size of the pool, rounded up to a multiple of kMinExtentBytes. 0: the pool grows with its use,
  // as long as the tenant's quota and max_pool_bytes allow.
  size_t capacity_bytes = 0;
  IndexDescriptor default_index;
  Rank rank = {};
  size_t quota_bytes = 0;  // limit of the bytes in use, at most capacity_bytes; 0 = capacity_bytes
  // The capacity was 0, and the store has set it to the most that the pool may grow to.
  bool grows = false;
  CacheKind kind = CacheKind::kRows;
  // None: that of StoreOptions, or the one that an open cache has. Not part of a cache's identity,
  // and forgotten when the process ends.
  std::optional<PrefillReport> prefill = {};
};

// Returns the spec of the cache that is made: with capacity_bytes 0, it may grow to `most_bytes`.
CacheSpec ResolveCapacity(CacheSpec spec, size_t most_bytes);
// Checks every field. Errors: kInvalidArgument or kUnimplemented; the message names the field and
// the limit.
absl::Status ValidateCacheSpec(const CacheSpec& spec);
// Checks an index descriptor. Errors: kInvalidArgument (m, b or the layout is out of range, or m
// does not divide key_dim), naming `field`.
absl::Status ValidateIndex(const IndexDescriptor& index, uint32_t key_dim, std::string_view field);

// Tensor that is borrowed from the caller. Strides are in elements.
struct TensorView {
  const std::byte* data = nullptr;
  size_t data_bytes = 0;  // readable bytes, starting at `data`
  kernels::DType dtype = kernels::DType::kF32;
  std::vector<uint64_t> shape;
  std::vector<int64_t> strides;  // empty = contiguous, last index fastest
};

}  // namespace pqcached::kvstore

#endif  // PQCACHED_KVSTORE_MODEL_H_

// Words of the store: what a cache, a sequence, a selection is made of. Plain values, checked by
// Validate functions.
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
#include "kernels/dtype.h"
#include "kvstore/read/layout.h"
#include "kvstore/read/selection.h"

namespace pqcached::kvstore {

enum class LayerKind : uint8_t { kSelected = 1, kFull = 2, kWindow = 3, kNone = 4 };

// How keys were rotated. Not used by this version's indexes; a part of what a cache is.
struct Rope {
  uint8_t layout = 0;  // as the wire numbers it
  double theta = 0;
  uint32_t rotary_dim = 0;
  friend bool operator==(const Rope&, const Rope&) = default;
};

// Layers of one kind. kFull and kWindow are refused by name (kUnimplemented).
struct LayerGroup {
  LayerKind kind = LayerKind::kSelected;
  std::vector<uint32_t>
      layers;             // absolute layer numbers, ascending, < kMaxLayers; no layer in two groups
  uint32_t kv_heads = 0;  // 1..kMaxKvHeads; the following fields are ignored for kNone
  uint32_t query_heads =
      0;  // a multiple of kv_heads, at most kMaxQueryHeads and kMaxGroupSize per kv head
  uint32_t key_dim = 0;    // kMinHeadDim..kMaxHeadDim, a multiple of kHeadDimMultiple
  uint32_t value_dim = 0;  // likewise
  kernels::DType dtype = kernels::DType::kF16;
  float softmax_scale = 0;  // 0 = 1 / sqrt(key_dim)
  float softcap = 0;        // 0 = none
  Rope rope = {};

  uint32_t group_size() const { return query_heads / kv_heads; }
  uint32_t row_bytes() const;
  float scale() const;
};

// A part of a model that spans several processes: each rank opens a cache of its own under one name.
// Ranks of a group agree on model_fingerprint and rank_count; each (layer, kv head) range is its own.
struct Rank {
  std::string group;  // at most 128 bytes; empty = one process, and the rest is 0
  uint32_t rank = 0;
  uint32_t rank_count = 0;     // 1..1024
  uint32_t kv_head_begin = 0;  // of its kv heads, in every layer; all of them below kMaxKvHeads
  uint32_t layer_begin = 0;    // its layers (absolute numbers) begin at or behind it
  friend bool operator==(const Rank&, const Rank&) = default;
};

struct CacheSpec {
  std::string name;               // 1..128 bytes
  std::string model_fingerprint;  // 1..256 bytes; all that makes K and V differ: weights revision,
                                  // RoPE scaling, adapters
  std::vector<LayerGroup> groups;
  size_t capacity_bytes = 0;  // of the pool; > 0, rounded up to kMinExtentBytes
  IndexDescriptor default_index;
  Rank rank = {};
  size_t quota_bytes = 0;  // of what may be in use, at most capacity_bytes; 0 = capacity_bytes
};

// Checks every field. Errors: kInvalidArgument or kUnimplemented, naming field and limit.
absl::Status ValidateCacheSpec(const CacheSpec& spec);
// Errors: kInvalidArgument (m, b, or m does not divide key_dim), naming `field`.
absl::Status ValidateIndex(const IndexDescriptor& index, uint32_t key_dim, std::string_view field);

// A borrowed tensor of the caller. Strides are in elements.
struct TensorView {
  const std::byte* data = nullptr;
  size_t data_bytes = 0;  // readable bytes from `data` on
  kernels::DType dtype = kernels::DType::kF32;
  std::vector<uint64_t> shape;
  std::vector<int64_t> strides;  // empty = contiguous, last index fastest
};

struct TokenRange {
  uint64_t begin = 0;
  uint64_t end = 0;
};

}  // namespace pqcached::kvstore

#endif  // PQCACHED_KVSTORE_MODEL_H_

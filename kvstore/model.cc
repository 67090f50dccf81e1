#include "kvstore/model.h"

#include <algorithm>
#include <cmath>
#include <set>

#include "absl/strings/str_cat.h"
#include "kernels/base/status_macros.h"
#include "kvstore/read/indexes/index_types.h"
#include "kvstore/read/reader.h"
#include "kvstore/refusal.h"

namespace pqcached::kvstore {
namespace {

constexpr size_t kMaxGroups = 16;
constexpr uint32_t kMaxRanks = 1024;

absl::Status OutOfLimits(absl::string_view field, uint64_t value, uint64_t low, uint64_t high,
                         absl::string_view unit = "") {
  return InvalidArgument(field, absl::StrCat(value, unit, ", must lie in [", low, ", ", high, "]"));
}

absl::Status CheckDim(absl::string_view field, uint32_t dim) {
  if (dim < kMinHeadDim || dim > kMaxHeadDim) {
    return OutOfLimits(field, dim, kMinHeadDim, kMaxHeadDim);
  }
  if (dim % kHeadDimMultiple != 0) {
    return InvalidArgument(field, absl::StrCat(dim, ", must be a multiple of ", kHeadDimMultiple));
  }
  return absl::OkStatus();
}

absl::Status CheckLayers(const std::string& prefix, const LayerGroup& group,
                         std::set<uint32_t>& seen) {
  if (group.layers.empty()) {
    return InvalidArgument(prefix + "layers", "empty");
  }
  for (size_t i = 0; i < group.layers.size(); ++i) {
    const uint32_t layer = group.layers[i];
    if (layer >= kMaxLayers) {
      return OutOfLimits(absl::StrCat(prefix, "layers[", i, "]"), layer, 0, kMaxLayers - 1);
    }
    if (i > 0 && layer <= group.layers[i - 1]) {
      return InvalidArgument(absl::StrCat(prefix, "layers[", i, "]"), "not ascending");
    }
    if (!seen.insert(layer).second) {
      return InvalidArgument(absl::StrCat(prefix, "layers[", i, "]"),
                             absl::StrCat("layer ", layer, " is in two groups"));
    }
  }
  return absl::OkStatus();
}

absl::Status CheckShape(const std::string& prefix, const LayerGroup& group) {
  if (group.kv_heads == 0 || group.kv_heads > kMaxKvHeads) {
    return OutOfLimits(prefix + "kv_heads", group.kv_heads, 1, kMaxKvHeads);
  }
  if (group.query_heads == 0 || group.query_heads > kMaxQueryHeads) {
    return OutOfLimits(prefix + "query_heads", group.query_heads, 1, kMaxQueryHeads);
  }
  if (group.query_heads % group.kv_heads != 0) {
    return InvalidArgument(
        prefix + "query_heads",
        absl::StrCat(group.query_heads, ", must be a multiple of kv_heads, ", group.kv_heads));
  }
  if (group.group_size() > kMaxGroupSize) {
    return Unimplemented(prefix + "query_heads",
                         absl::StrCat(group.group_size(), " per kv head; at most ", kMaxGroupSize));
  }
  if (group.kind != LayerKind::kValues) {
    RETURN_IF_ERROR(CheckDim(prefix + "key_dim", group.key_dim));
  } else if (group.key_dim != 0) {
    return InvalidArgument(prefix + "key_dim",
                           absl::StrCat(group.key_dim, ", must be 0 for layers of kind values"));
  }
  if (group.value_dim == 0) {
    return Unimplemented(prefix + "value_dim", "0 (no values)");
  }
  RETURN_IF_ERROR(CheckDim(prefix + "value_dim", group.value_dim));
  if (!kernels::IsDType(static_cast<uint8_t>(group.dtype))) {
    return InvalidArgument(prefix + "dtype", "unknown");
  }
  if (!std::isfinite(group.softmax_scale) || group.softmax_scale < 0) {
    return InvalidArgument(prefix + "softmax_scale", "must be finite and not negative");
  }
  if (!std::isfinite(group.softcap) || group.softcap < 0) {
    return InvalidArgument(prefix + "softcap", "must be finite and not negative");
  }
  return absl::OkStatus();
}

absl::Status CheckGroup(const std::string& prefix, const LayerGroup& group,
                        std::set<uint32_t>& seen) {
  if (group.kind < LayerKind::kSelected || group.kind > LayerKind::kValues) {
    return InvalidArgument(prefix + "kind", "unknown");
  }
  const bool has_window = group.kind == LayerKind::kWindow;
  if (has_window && (group.window_tokens == 0 || group.window_tokens > kMaxSequenceTokens)) {
    return OutOfLimits(prefix + "window_tokens", group.window_tokens, 1, kMaxSequenceTokens);
  }
  if (!has_window && group.window_tokens != 0) {
    return InvalidArgument(
        prefix + "window_tokens",
        absl::StrCat(group.window_tokens, ", must be 0 for layers of a kind other than window"));
  }
  RETURN_IF_ERROR(CheckLayers(prefix, group, seen));
  return group.kind == LayerKind::kNone ? absl::OkStatus() : CheckShape(prefix, group);
}

absl::Status CheckRank(const CacheSpec& spec) {
  const Rank& rank = spec.rank;
  if (rank.group.size() > kMaxNameBytes) {
    return OutOfLimits("rank.group", rank.group.size(), 0, kMaxNameBytes, " bytes");
  }
  if (rank.group.empty()) {
    if (rank == Rank{}) return absl::OkStatus();
    return InvalidArgument("rank.group", "empty; then all of rank must be 0");
  }
  if (rank.rank_count == 0 || rank.rank_count > kMaxRanks) {
    return OutOfLimits("rank.rank_count", rank.rank_count, 1, kMaxRanks);
  }
  if (rank.rank >= rank.rank_count) {
    return OutOfLimits("rank.rank", rank.rank, 0, rank.rank_count - 1);
  }
  for (const LayerGroup& group : spec.groups) {
    if (group.kind != LayerKind::kNone && group.kv_heads <= kMaxKvHeads &&
        rank.kv_head_begin > kMaxKvHeads - group.kv_heads) {
      return OutOfLimits("rank.kv_head_begin", rank.kv_head_begin, 0, kMaxKvHeads - group.kv_heads);
    }
    if (!group.layers.empty() && group.layers.front() < rank.layer_begin) {
      return OutOfLimits("rank.layer_begin", rank.layer_begin, 0, group.layers.front());
    }
  }
  return absl::OkStatus();
}

absl::Status CheckQuota(const CacheSpec& spec) {
  if (spec.capacity_bytes == 0 || spec.quota_bytes <= spec.capacity_bytes) return absl::OkStatus();
  return InvalidArgument(
      "quota_bytes",
      absl::StrCat(spec.quota_bytes, ", must be at most capacity_bytes, ", spec.capacity_bytes));
}

// Checks that a page cache has a capacity, and nothing of a cache of rows.
absl::Status CheckPageCache(const CacheSpec& spec) {
  // A cache that grows would grow instead of evicting pages, which can be had again.
  if (spec.capacity_bytes == 0) return InvalidArgument("capacity_bytes", "0");
  if (!spec.groups.empty()) return InvalidArgument("layer_groups", "a page cache has none");
  if (!spec.model_fingerprint.empty()) {
    return InvalidArgument("model_fingerprint", "a page cache has none");
  }
  if (spec.rank == Rank{}) return absl::OkStatus();
  return InvalidArgument("rank", "a page cache has none");
}

}  // namespace

uint32_t LayerGroup::row_bytes() const {
  return (key_dim + value_dim) * static_cast<uint32_t>(kernels::DTypeBytes(dtype));
}

float LayerGroup::scale() const {
  if (softmax_scale > 0 || key_dim == 0) return softmax_scale > 0 ? softmax_scale : 1.0f;
  return 1.0f / std::sqrt(static_cast<float>(key_dim));
}

CacheSpec ResolveCapacity(CacheSpec spec, size_t most_bytes) {
  if (spec.capacity_bytes > 0) return spec;
  spec.grows = true;
  spec.capacity_bytes = most_bytes;
  spec.quota_bytes = std::min(spec.quota_bytes, most_bytes);
  return spec;
}

absl::Status ValidateCacheSpec(const CacheSpec& spec) {
  if (spec.name.empty() || spec.name.size() > kMaxNameBytes) {
    return OutOfLimits("name", spec.name.size(), 1, kMaxNameBytes, " bytes");
  }
  RETURN_IF_ERROR(CheckQuota(spec));
  if (spec.kind == CacheKind::kPages) return CheckPageCache(spec);
  if (spec.model_fingerprint.empty() || spec.model_fingerprint.size() > kMaxFingerprintBytes) {
    return OutOfLimits("model_fingerprint", spec.model_fingerprint.size(), 1, kMaxFingerprintBytes,
                       " bytes");
  }
  if (spec.groups.empty() || spec.groups.size() > kMaxGroups) {
    return OutOfLimits("layer_groups", spec.groups.size(), 1, kMaxGroups, " groups");
  }
  std::set<uint32_t> seen;
  bool stores_rows = false;
  for (size_t i = 0; i < spec.groups.size(); ++i) {
    const LayerGroup& group = spec.groups[i];
    const std::string prefix = absl::StrCat("layer_groups[", i, "].");
    RETURN_IF_ERROR(CheckGroup(prefix, group, seen));
    if (group.kind == LayerKind::kNone) continue;
    stores_rows = true;
    if (group.kind != LayerKind::kSelected) continue;
    RETURN_IF_ERROR(ValidateIndex(spec.default_index, group.key_dim, "default_index"));
  }
  if (!stores_rows) {
    return InvalidArgument("layer_groups", "no group of kind selected, full, window or values");
  }
  return CheckRank(spec);
}

absl::Status ValidateIndex(const IndexDescriptor& index, uint32_t key_dim, std::string_view field) {
  return ToStatus(CheckIndex(index, key_dim, std::string(field).c_str()));
}

}  // namespace pqcached::kvstore

#include "kvstore/store/cache_rules.h"

#include <cstdint>
#include <vector>

#include "absl/strings/str_cat.h"

namespace pqcached::kvstore {
namespace {

struct StoredLayer {
  uint32_t layer = 0;
  const LayerGroup* group = nullptr;
};

std::vector<StoredLayer> LayersOf(const CacheSpec& spec) {
  std::vector<StoredLayer> layers;
  for (const LayerGroup& group : spec.groups) {
    if (group.kind == LayerKind::kNone) continue;
    for (const uint32_t layer : group.layers) layers.push_back({layer, &group});
  }
  return layers;
}

// Returns whether two descriptions of a rotation may be of one model: a client that does not know
// the layout of pairs leaves it open.
bool Agree(const Rope& a, const Rope& b) {
  const bool same_layout = a.layout == b.layout || a.layout == 0 || b.layout == 0;
  return same_layout && a.theta == b.theta && a.rotary_dim == b.rotary_dim;
}

}  // namespace

std::string FindDifference(const CacheSpec& a, const CacheSpec& b) {
  if (a.model_fingerprint != b.model_fingerprint) return "model_fingerprint";
  if (a.groups.size() != b.groups.size()) return "layer_groups";
  if (a.rank.group != b.rank.group) return "rank.group";
  if (a.rank.rank_count != b.rank.rank_count) return "rank.rank_count";
  if (a.rank.kv_head_begin != b.rank.kv_head_begin) return "rank.kv_head_begin";
  if (a.rank.layer_begin != b.rank.layer_begin) return "rank.layer_begin";
  for (size_t i = 0; i < a.groups.size(); ++i) {
    const LayerGroup& x = a.groups[i];
    const LayerGroup& y = b.groups[i];
    const std::string prefix = absl::StrCat("layer_groups[", i, "].");
    if (x.kind != y.kind) return prefix + "kind";
    if (x.layers != y.layers) return prefix + "layers";
    if (x.kind == LayerKind::kNone) continue;
    if (x.kv_heads != y.kv_heads) return prefix + "kv_heads";
    if (x.query_heads != y.query_heads) return prefix + "query_heads";
    if (x.key_dim != y.key_dim) return prefix + "key_dim";
    if (x.value_dim != y.value_dim) return prefix + "value_dim";
    if (x.dtype != y.dtype) return prefix + "dtype";
    if (x.scale() != y.scale()) return prefix + "softmax_scale";
    if (x.softcap != y.softcap) return prefix + "softcap";
    if (!Agree(x.rope, y.rope)) return prefix + "rope";
    if (x.window_tokens != y.window_tokens) return prefix + "window_tokens";
  }
  return {};
}

std::string FindIncompatibleField(const CacheSpec& a, const CacheSpec& b) {
  if (a.model_fingerprint != b.model_fingerprint) return "model_fingerprint";
  if (a.rank.rank_count != b.rank.rank_count) return "rank.rank_count";
  for (const StoredLayer& x : LayersOf(a)) {
    for (const StoredLayer& y : LayersOf(b)) {
      if (x.layer != y.layer) continue;
      const std::string group = absl::StrCat("layer_groups[", y.group - b.groups.data(), "].");
      if (x.group->kind != y.group->kind) return group + "kind";
      if (x.group->window_tokens != y.group->window_tokens) return group + "window_tokens";
      if (x.group->key_dim != y.group->key_dim) return group + "key_dim";
      if (x.group->value_dim != y.group->value_dim) return group + "value_dim";
      if (x.group->group_size() != y.group->group_size()) return group + "query_heads";
      if (x.group->dtype != y.group->dtype) return group + "dtype";
      if (x.group->scale() != y.group->scale()) return group + "softmax_scale";
      if (x.group->softcap != y.group->softcap) return group + "softcap";
      if (!Agree(x.group->rope, y.group->rope)) return group + "rope";
      const uint32_t a_begin = a.rank.kv_head_begin;
      const uint32_t b_begin = b.rank.kv_head_begin;
      if (a_begin < b_begin + y.group->kv_heads && b_begin < a_begin + x.group->kv_heads) {
        return "rank.kv_head_begin";
      }
    }
  }
  return {};
}

}  // namespace pqcached::kvstore

#include "kvstore/records/cache_image.h"

#include <span>

#include "kvstore/read/indexes/index_types.h"

namespace pqcached::kvstore {
namespace {

// A cache outlives the plug-in of its default index, which calls then refuse by name.
bool IsReadable(CacheSpec spec) {
  if (IsPlugin(spec.default_index)) spec.default_index = {};
  return spec.capacity_bytes > 0 && ValidateCacheSpec(spec).ok();
}

}  // namespace

void WriteSpec(const CacheSpec& spec, RecordWriter& writer) {
  writer.AddText(spec.name);
  writer.AddText(spec.model_fingerprint);
  if (spec.grows) writer.Add(uint64_t{0});  // earlier processes refuse this capacity
  writer.Add(uint64_t{spec.capacity_bytes});
  writer.Add(uint64_t{spec.quota_bytes});
  writer.Add(spec.default_index);
  writer.AddText(spec.rank.group);
  writer.Add(spec.rank.rank);
  writer.Add(spec.rank.rank_count);
  writer.Add(spec.rank.kv_head_begin);
  writer.Add(spec.rank.layer_begin);
  writer.Add(static_cast<uint32_t>(spec.groups.size()));
  for (const LayerGroup& group : spec.groups) {
    writer.Add(group.kind);
    writer.Add(static_cast<uint32_t>(group.layers.size()));
    writer.AddAll(std::span(group.layers));
    writer.Add(group.kv_heads);
    writer.Add(group.query_heads);
    writer.Add(group.key_dim);
    writer.Add(group.value_dim);
    writer.Add(group.dtype);
    writer.Add(group.softmax_scale);
    writer.Add(group.softcap);
    writer.Add(group.rope.layout);
    writer.Add(group.rope.theta);
    writer.Add(group.rope.rotary_dim);
    // Only in records of this kind, so that the others stay what earlier processes wrote.
    if (group.kind == LayerKind::kWindow) writer.Add(group.window_tokens);
  }
}

std::optional<CacheSpec> ReadSpec(RecordReader& reader) {
  CacheSpec spec;
  spec.name = reader.GetText();
  spec.model_fingerprint = reader.GetText();
  spec.capacity_bytes = reader.Get<uint64_t>();
  spec.grows = spec.capacity_bytes == 0;
  if (spec.grows) spec.capacity_bytes = reader.Get<uint64_t>();
  spec.quota_bytes = reader.Get<uint64_t>();
  spec.default_index = reader.Get<IndexDescriptor>();
  spec.rank.group = reader.GetText();
  spec.rank.rank = reader.Get<uint32_t>();
  spec.rank.rank_count = reader.Get<uint32_t>();
  spec.rank.kv_head_begin = reader.Get<uint32_t>();
  spec.rank.layer_begin = reader.Get<uint32_t>();
  const auto group_count = reader.Get<uint32_t>();
  // Only a page cache has no groups, so that the records of others stay what earlier processes
  // wrote.
  if (group_count == 0) spec.kind = CacheKind::kPages;
  for (uint32_t i = 0; i < group_count && reader.ok(); ++i) {
    LayerGroup group;
    group.kind = reader.Get<LayerKind>();
    group.layers = reader.GetAll<uint32_t>(reader.Get<uint32_t>());
    group.kv_heads = reader.Get<uint32_t>();
    group.query_heads = reader.Get<uint32_t>();
    group.key_dim = reader.Get<uint32_t>();
    group.value_dim = reader.Get<uint32_t>();
    group.dtype = reader.Get<kernels::DType>();
    group.softmax_scale = reader.Get<float>();
    group.softcap = reader.Get<float>();
    group.rope.layout = reader.Get<uint8_t>();
    group.rope.theta = reader.Get<double>();
    group.rope.rotary_dim = reader.Get<uint32_t>();
    if (group.kind == LayerKind::kWindow) group.window_tokens = reader.Get<uint32_t>();
    spec.groups.push_back(std::move(group));
  }
  if (!reader.ok() || !IsReadable(spec)) return std::nullopt;
  return spec;
}

}  // namespace pqcached::kvstore

#include "kvstore/share/attach.h"

#include <algorithm>
#include <set>

#include "kvstore/read/indexes/plugin_names.h"

namespace pqcached::kvstore {
namespace {

LayerDescriptor DescribeLayer(const StoredLayers::Layer& layer, uint32_t layer_slot,
                              const SegmentEntry& entry, const SegmentList& list,
                              uint32_t layer_tokens) {
  LayerDescriptor descriptor;
  descriptor.layer = layer.layer;
  descriptor.row_bytes = layer.shape.row_bytes;
  descriptor.kv_head_count = layer.shape.kv_heads;
  const bool filled = entry.closed && layer_tokens >= entry.token_end;
  size_t shown = 0;
  for (size_t i = 0; i < list.indexes.size(); ++i) {
    if (IsPlugin(list.indexes[i])) continue;
    const size_t slot = shown++;
    const SegmentIndex* index = i < entry.indexes.size() ? entry.indexes[i].get() : nullptr;
    descriptor.state[slot] = filled ? LayerState::kFilled : LayerState::kEmpty;
    if (index == nullptr || !index->ready(layer_slot)) continue;
    descriptor.state[slot] = LayerState::kReady;
    descriptor.index_data[slot] = index->extent(layer_slot);
    descriptor.codebook[slot] = index->codebooks()[layer_slot]->extent();
  }
  return descriptor;
}

}  // namespace

Attachment MakeAttachment(const Cache& cache, uint64_t sequence_id, uint64_t version,
                          const SegmentList& list, const std::vector<uint32_t>& layer_tokens) {
  Attachment attachment;
  AttachmentHeader& header = attachment.header;
  header.sequence_id = sequence_id;
  header.version = version;
  header.token_count = *std::min_element(layer_tokens.begin(), layer_tokens.end());
  header.layer_count = cache.layers.size();
  header.segment_count = static_cast<uint32_t>(list.segments.size());
  // Clients have no plug-ins, and read these indexes by RPCs.
  const auto end =
      std::remove_copy_if(list.indexes.begin(), list.indexes.end(), header.indexes,
                          [](const IndexDescriptor& index) { return IsPlugin(index); });
  header.index_count = static_cast<uint32_t>(end - header.indexes);
  attachment.layer_tokens = layer_tokens;
  attachment.layers.reserve(list.segments.size() * cache.layers.size());
  attachment.row_extents.reserve(list.segments.size() * cache.layers.head_count);
  for (const SegmentEntry& entry : list.segments) {
    attachment.segments.push_back({.segment_id = entry.rows->segment_id(),
                                   .first_position = entry.rows->first_position(),
                                   .slot_capacity = entry.rows->slot_capacity(),
                                   .token_end = entry.closed ? entry.token_end : 0});
    for (uint32_t slot = 0; slot < cache.layers.size(); ++slot) {
      const StoredLayers::Layer& layer = cache.layers.layers[slot];
      LayerDescriptor descriptor = DescribeLayer(layer, slot, entry, list, layer_tokens[slot]);
      descriptor.row_extent_begin = static_cast<uint32_t>(attachment.row_extents.size());
      for (uint32_t head = 0; head < layer.shape.kv_heads; ++head) {
        attachment.row_extents.push_back(entry.rows->extent(layer.first_head + head));
      }
      attachment.layers.push_back(descriptor);
    }
  }
  header.row_extent_count = static_cast<uint32_t>(attachment.row_extents.size());
  return attachment;
}

size_t HeldBytes(std::span<const std::shared_ptr<const SegmentList>> lists) {
  std::set<const void*> seen;
  size_t bytes = 0;
  const auto count = [&](const auto& part) {
    if (part != nullptr && seen.insert(part.get()).second) bytes += part->used_bytes();
  };
  for (const auto& list : lists) {
    for (const SegmentEntry& entry : list->segments) {
      count(entry.rows);
      for (const auto& index : entry.indexes) {
        if (index == nullptr) continue;
        count(index);
        for (const auto& codebook : index->codebooks()) count(codebook);
      }
    }
  }
  return bytes;
}

}  // namespace pqcached::kvstore

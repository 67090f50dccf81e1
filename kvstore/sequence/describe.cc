#include "kvstore/sequence/describe.h"

#include <algorithm>
#include <set>

#include "kvstore/read/indexes/index_types.h"

namespace pqcached::kvstore {
namespace {

// Returns the end position (exclusive) of segment `i`. For the active segment this is the end of
// the tokens that it shows now.
uint32_t SegmentEnd(const Snapshot& snapshot, size_t i) {
  const std::vector<SegmentEntry>& entries = snapshot.list->segments;
  if (entries[i].closed) return entries[i].token_end;
  return *std::max_element(snapshot.layer_tokens.begin(), snapshot.layer_tokens.end());
}

SegmentInfo DescribeSegment(const Cache& cache, const Snapshot& snapshot, size_t i) {
  const SegmentEntry& entry = snapshot.list->segments[i];
  const uint32_t first = entry.rows->first_position();
  const uint32_t end = std::min(SegmentEnd(snapshot, i), snapshot.token_count());
  SegmentInfo info{.segment_id = entry.rows->segment_id(),
                   .tokens = {first, std::max(first, end)},
                   .slot_capacity = entry.rows->slot_capacity(),
                   .codebook_generations = {}};
  const bool indexed =
      !IsBuilt(cache.spec.default_index) ||
      std::any_of(entry.indexes.begin(), entry.indexes.end(),
                  [](const auto& index) { return index != nullptr && index->all_ready(); });
  const bool complete = SegmentEnd(snapshot, i) <= snapshot.token_count();
  if (entry.closed) {
    info.state = indexed && complete ? SegmentState::kSealed : SegmentState::kClosed;
  }
  for (const auto& index : entry.indexes) {
    info.codebook_generations.push_back(index == nullptr ? ~0u : index->codebook_generation());
  }
  return info;
}

LayerInfo DescribeLayer(const Cache& cache, const Snapshot& snapshot, uint32_t slot) {
  LayerInfo info{.layer = cache.layers.layers[slot].layer,
                 .row_count = snapshot.layer_tokens[slot],
                 .index_states = {}};
  if (const auto samples = snapshot.list->SamplesOf(slot); samples != nullptr) {
    info.query_sample_count = static_cast<uint32_t>(samples->positions().size());
  }
  const bool has_index = cache.layers.layers[slot].shape.has_index();
  for (size_t index = 0; index < snapshot.list->indexes.size(); ++index) {
    const bool ready = !has_index || snapshot.list->index_ready(index, slot);
    info.index_states.push_back(ready ? LayerState::kReady : LayerState::kFilled);
  }
  return info;
}

}  // namespace

SequenceInfo Describe(const Cache& cache, const Sequence& sequence, const Snapshot& snapshot) {
  const SegmentList& list = *snapshot.list;
  SequenceInfo info{.sequence_id = sequence.sequence_id(),
                    .cache_id = cache.cache_id,
                    .session = sequence.session(),
                    .token_count = snapshot.token_count(),
                    .indexes = list.indexes,
                    .layers = {},
                    .segments = {}};
  info.is_cached_prefix = sequence.session().empty();
  info.pin_left = sequence.holds().pin_left();
  info.idle = sequence.holds().idle();
  info.group_key = sequence.group_key();
  for (uint32_t slot = 0; slot < cache.layers.size(); ++slot) {
    const LayerShape& shape = cache.layers.layers[slot].shape;
    const uint32_t tokens = snapshot.layer_tokens[slot];
    info.layers.push_back(DescribeLayer(cache, snapshot, slot));
    info.row_bytes += size_t{tokens} * shape.row_bytes * shape.kv_heads;
    for (size_t i = 0; shape.has_index() && i < list.segments.size(); ++i) {
      const SegmentRows& rows = *list.segments[i].rows;
      const uint32_t end = std::min(SegmentEnd(snapshot, i), tokens);
      const uint32_t slots = std::max(end, rows.first_position()) - rows.first_position();
      for (const IndexDescriptor& index : list.indexes) {
        info.index_bytes += IndexContentBytes(shape, index, rows.slot_capacity(), slots);
      }
    }
  }
  for (const auto& samples : list.samples) {
    if (samples != nullptr) info.used_bytes += samples->used_bytes();
  }
  std::set<const Codebook*> codebooks;  // segments of one generation share them
  for (size_t i = 0; i < list.segments.size(); ++i) {
    info.segments.push_back(DescribeSegment(cache, snapshot, i));
    const SegmentRows& rows = *list.segments[i].rows;
    info.used_bytes += rows.used_bytes();
    if (rows.user_count() > 1) info.shared_bytes += rows.used_bytes();
    for (const auto& index : list.segments[i].indexes) {
      if (index == nullptr) continue;
      info.used_bytes += index->used_bytes();
      for (const auto& codebook : index->codebooks()) {
        if (codebook == nullptr) continue;  // not trained yet
        if (!codebooks.insert(codebook.get()).second) continue;
        info.used_bytes += codebook->used_bytes();
        info.codebook_bytes += codebook->content_bytes();
      }
    }
  }
  return info;
}

}  // namespace pqcached::kvstore

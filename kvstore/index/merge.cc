#include "kvstore/index/merge.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "kernels/base/status_macros.h"
#include "kernels/select/pq.h"
#include "kvstore/index/layer_build.h"
#include "kvstore/memory/durable_store.h"
#include "kvstore/read/indexes/index_types.h"
#include "kvstore/read/indexes/seeds.h"
#include "kvstore/refusal.h"

namespace pqcached::kvstore {
namespace {

struct Run {
  std::span<const SegmentEntry> entries;

  uint32_t begin() const { return entries.front().rows->first_position(); }
  uint32_t end() const { return entries.back().token_end; }
  uint32_t tokens_of(const SegmentEntry& entry) const {
    return entry.token_end - entry.rows->first_position();
  }
};

absl::StatusOr<std::shared_ptr<const SegmentRows>> CopyRows(const Cache& cache, const Run& run) {
  const NewSegment wanted{.segment_id = cache.counters.next_segment_id++,
                          .first_position = run.begin(),
                          .slot_capacity = RoundUpToBlock(run.end() - run.begin())};
  ASSIGN_OR_RETURN(auto created, CreateSegments(*cache.pool, cache.layers, {&wanted, 1}, {}));
  const SegmentRows& to = *created.front().rows;
  std::vector<uint32_t> row_bytes(cache.layers.head_count);
  for (const StoredLayers::Layer& layer : cache.layers.layers) {
    std::fill_n(row_bytes.begin() + layer.first_head, layer.shape.kv_heads, layer.shape.row_bytes);
  }
  cache.compute.building.parallel_for().run(cache.layers.head_count, [&](uint32_t head, uint32_t) {
    std::byte* next = to.rows(head);
    for (const SegmentEntry& entry : run.entries) {
      const size_t bytes = size_t{run.tokens_of(entry)} * row_bytes[head];
      PQC_CRASH_POINT();
      std::memcpy(next, entry.rows->rows(head), bytes);
      next += bytes;
    }
  });
  return created.front().rows;
}

// Copies the run's codes. All segments of the run have the same codebook. Without `closes_later`,
// what takes long to close stays open, unless it can be copied.
absl::StatusOr<SegmentIndex::Layer> CopyCodes(const Cache& cache, const Run& run, size_t index,
                                              uint32_t layer_slot, const SegmentRows& rows,
                                              uint32_t sink_tokens, bool closes_later,
                                              const std::function<bool()>& keep_going) {
  const StoredLayers::Layer& layer = cache.layers.layers[layer_slot];
  const SegmentIndex& newest = *run.entries.back().indexes[index];
  const std::vector<size_t> sizes_bytes = {
      SegmentIndex::LayerBytes(newest.index(), layer.shape, rows.slot_capacity())};
  ASSIGN_OR_RETURN(auto extents, cache.pool->Allocate(sizes_bytes));
  const uint32_t sink_end = std::clamp(sink_tokens, run.begin(), run.end());
  const SegmentIndex::Layer data =
      SegmentIndex::MakeLayer(layer.shape, rows.slot_capacity(), sink_end - run.begin(),
                              std::move(extents.front()), newest.codebook(layer_slot));
  const BuiltIndexType& type = BuiltTypeOf(newest.index());
  const bool stays_open = type.ClosesLater() && !closes_later;
  std::atomic<bool> stopped = false, is_open = false;
  cache.compute.building.parallel_for().run(layer.shape.kv_heads, [&](uint32_t kv_head, uint32_t) {
    bool is_closed = false;
    for (const SegmentEntry& entry : run.entries) {
      PQC_CRASH_POINT();
      const bool closed =
          type.CopyCodes(entry.indexes[index]->header(layer_slot), kv_head, run.tokens_of(entry),
                         entry.rows->first_position() - run.begin(), &data.header());
      is_closed = closed && run.entries.size() == 1;
    }
    if (is_closed || stopped) return;
    if (stays_open) {
      is_open = true;
      return;
    }
    const bool closed =
        CloseHead(cache.compute, layer, rows, data, kv_head, run.end() - run.begin(), keep_going);
    if (!closed) stopped = true;
  });
  if (stopped) return Cancelled("the merge was given up");
  if (!is_open) PublishClosing(data, run.end() - run.begin());
  return data;
}

absl::StatusOr<SegmentIndex::Layer> MergeLayer(const Cache& cache, const MergeSpec& spec,
                                               size_t index, uint32_t layer_slot,
                                               const std::shared_ptr<const SegmentRows>& rows) {
  const Run run{spec.run};
  const auto& newest = run.entries.back().indexes[index]->codebook(layer_slot);
  const SegmentTokens tokens{rows, {run.begin(), run.end()}};
  LayerTraining training{.layer_slot = layer_slot,
                         .index = newest->header().index,
                         .segments = {&tokens, 1},
                         .sink_tokens = spec.sink_tokens,
                         .sample_tokens = spec.sample_tokens,
                         .iterations = spec.iterations,
                         .seed = MixSeed(MixSeed(spec.seed, layer_slot), run.begin()),
                         .first = nullptr,
                         .keep_going = spec.keep_going};
  if (HasDrifted(MeasureLayer(cache, training, *newest), *newest, spec.drift_ratio)) {
    ASSIGN_OR_RETURN(auto fresh,
                     NewCodebook(cache, layer_slot, training.index, spec.new_generation));
    training.first = newest.get();
    TrainLayer(cache, training, *fresh);
    return CodeLayer(cache, layer_slot, *rows, run.end() - run.begin(), spec.sink_tokens,
                     std::move(fresh), spec.keep_going);
  }
  const bool same = std::all_of(run.entries.begin(), run.entries.end(), [&](const auto& entry) {
    return entry.indexes[index]->codebook(layer_slot) == newest;
  });
  return same ? CopyCodes(cache, run, index, layer_slot, *rows, spec.sink_tokens,
                          /*closes_later=*/true, spec.keep_going)
              : CodeLayer(cache, layer_slot, *rows, run.end() - run.begin(), spec.sink_tokens,
                          newest, spec.keep_going);
}

}  // namespace

absl::StatusOr<SegmentEntry> CopySegment(const Cache& cache, const SegmentEntry& entry) {
  const Run run{{&entry, 1}};
  ASSIGN_OR_RETURN(auto rows, CopyRows(cache, run));
  SegmentEntry copy{
      .rows = rows, .indexes = {}, .closed = true, .token_end = entry.token_end, .use = nullptr};
  for (size_t i = 0; i < entry.indexes.size(); ++i) {
    auto index = std::make_shared<const SegmentIndex>(cache.layers, entry.indexes[i]->index());
    for (uint32_t slot = 0; slot < cache.layers.size(); ++slot) {
      if (!cache.layers.layers[slot].shape.has_index()) continue;
      const uint32_t sink_tokens = run.begin() + entry.indexes[i]->header(slot).counted_begin;
      ASSIGN_OR_RETURN(auto layer, CopyCodes(cache, run, i, slot, *rows, sink_tokens,
                                             /*closes_later=*/false, {}));
      index = index->With(slot, std::move(layer));
    }
    copy.indexes.push_back(std::move(index));
  }
  return copy;
}

bool HasDrifted(double inertia, const Codebook& codebook, double drift_ratio) {
  return inertia > drift_ratio * codebook.header().inertia;
}

absl::StatusOr<SegmentEntry> MergeSegments(const Cache& cache, const MergeSpec& spec) {
  ASSIGN_OR_RETURN(auto rows, CopyRows(cache, {spec.run}));
  SegmentEntry merged{.rows = rows, .indexes = {}, .closed = true, .token_end = 0};
  merged.token_end = spec.run.back().token_end;
  for (size_t i = 0; i < spec.run.back().indexes.size(); ++i) {
    auto index =
        std::make_shared<const SegmentIndex>(cache.layers, spec.run.back().indexes[i]->index());
    for (uint32_t slot = 0; slot < cache.layers.size(); ++slot) {
      if (!cache.layers.layers[slot].shape.has_index()) continue;
      if (!spec.keep_going()) return Cancelled("the merge was given up");
      ASSIGN_OR_RETURN(auto layer, MergeLayer(cache, spec, i, slot, rows));
      index = index->With(slot, std::move(layer));
    }
    merged.indexes.push_back(std::move(index));
  }
  if (!spec.keep_going()) return Cancelled("the merge was given up");
  return merged;
}

}  // namespace pqcached::kvstore

#include "kvstore/index/live_sequence.h"

#include <algorithm>
#include <utility>

#include "kernels/base/status_macros.h"
#include "kernels/train/pq_encode.h"
#include "kvstore/checksum/verify.h"
#include "kvstore/clock.h"
#include "kvstore/index/cost_model.h"
#include "kvstore/index/merge.h"
#include "kvstore/index/shrink.h"
#include "kvstore/read/indexes/index_types.h"
#include "kvstore/read/indexes/seeds.h"
#include "kvstore/refusal.h"

namespace pqcached::kvstore {
namespace {

// The first codebook of a layer is trained ahead from 1/8 of a segment on; fewer rows take no time.
constexpr uint32_t kAheadParts = 8;
constexpr absl::Duration kWriterWait = absl::Milliseconds(2);

// Returns the end position (exclusive) of the tokens of a layer in this entry when all of them are
// final; 0 when some are still missing.
uint32_t FinalEnd(const Snapshot& snapshot, const SegmentEntry& entry, uint32_t layer_slot) {
  const uint32_t end = entry.closed ? entry.token_end : entry.rows->end_capacity();
  return snapshot.layer_tokens[layer_slot] >= end ? end : 0;
}

}  // namespace

LiveSequence::LiveSequence(std::shared_ptr<const Cache> cache, std::shared_ptr<Sequence> sequence,
                           const LiveIndex& spec)
    : cache_(std::move(cache)),
      sequence_(std::move(sequence)),
      spec_(spec),
      sample_tokens_(spec.train_tokens > 0 ? spec.train_tokens : cache_->segmenting.train_tokens),
      needs_samples_(cache_->layers.size()),
      layers_(cache_->layers.size()) {
  trains_on_rows_ = !IsBuilt(spec.index) || BuiltTypeOf(spec.index).TrainsOnRows();
  for (uint32_t slot = 0; slot < layers_.size() && IsBuilt(spec.index); ++slot) {
    needs_samples_[slot] =
        HasIndex(slot) &&
        BuiltTypeOf(spec.index).NeedsSamples(spec.index, cache_->layers.layers[slot].shape.key_dim);
  }
}

absl::StatusOr<bool> LiveSequence::Step(Purpose purpose, const std::function<bool()>& keep_going) {
  ASSIGN_OR_RETURN(auto snapshot, sequence_->Peek());
  RETURN_IF_ERROR(VerifyList(*cache_, *snapshot->list));
  go_on_ = [this, keep_going] { return keep_going() && !sequence_->dropped(); };
  ordinal_ = snapshot->list->Find(spec_.index);
  if (!begun_) Begin(*snapshot);
  for (uint32_t slot = 0; slot < layers_.size(); ++slot) {  // indexed again after a truncation
    layers_[slot].done_end = std::min(layers_[slot].done_end, snapshot->layer_tokens[slot]);
  }
  auto worked = purpose == Purpose::kDecode ? StepForDecode(*snapshot) : StepForUpkeep(*snapshot);
  // Another writer may replace a segment between snapshot and publication; the next snapshot
  // contains the result.
  if (absl::IsAborted(worked.status()) || absl::IsCancelled(worked.status())) return true;
  return worked;
}

// Adopts the codebooks of a segment whose samples may be lost: layers without one could train none.
void LiveSequence::AdoptMaps(const SegmentIndex& index, uint32_t first_position) {
  for (uint32_t slot = 0; slot < layers_.size(); ++slot) {
    LayerState& state = layers_[slot];
    if (!needs_samples_[slot] || state.codebook != nullptr || !index.ready(slot)) continue;
    state.codebook = index.codebook(slot);
    state.generation_begin = first_position;
    state.mature = !trains_on_rows_;
    next_generation_ = std::max(next_generation_, state.codebook->header().codebook_generation + 1);
  }
}

// Adopts the codes of segments that the sequence shares with another one.
void LiveSequence::Begin(const Snapshot& snapshot) {
  begun_ = true;
  for (const SegmentEntry& entry : snapshot.list->segments) {
    const SegmentIndex* index = IndexOf(entry);
    if (index != nullptr) AdoptMaps(*index, entry.rows->first_position());
    if (index == nullptr || !entry.closed) break;
    for (uint32_t slot = 0; slot < layers_.size(); ++slot) {
      LayerState& state = layers_[slot];
      if (!index->ready(slot) || state.done_end != entry.rows->first_position()) continue;
      state.done_end = entry.token_end;
      if (state.codebook != index->codebook(slot)) {
        state.codebook = index->codebook(slot);
        state.generation_begin = entry.rows->first_position();
      }
      state.trained_end = state.done_end;
      state.mature = !trains_on_rows_ ||
                     state.done_end - state.generation_begin >= cache_->segmenting.codebook_tokens;
      next_generation_ =
          std::max(next_generation_, state.codebook->header().codebook_generation + 1);
    }
  }
}

bool LiveSequence::CanTrain(const Snapshot& snapshot, uint32_t layer_slot) const {
  return layers_[layer_slot].codebook != nullptr || !needs_samples_[layer_slot] ||
         snapshot.list->SamplesOf(layer_slot) != nullptr;
}

bool LiveSequence::IsTail(const SegmentEntry& entry) const {
  return cache_->segmenting.IsTail(entry.rows->slot_capacity());
}

const SegmentIndex* LiveSequence::IndexOf(const SegmentEntry& entry) const {
  return ordinal_ < entry.indexes.size() ? entry.indexes[ordinal_].get() : nullptr;
}

bool LiveSequence::IsCoded(const SegmentEntry& entry, uint32_t layer_slot) const {
  const SegmentIndex* index = IndexOf(entry);
  return index != nullptr && index->ready(layer_slot);
}

LiveSequence::Place LiveSequence::FindNext(const Snapshot& snapshot, bool coded) {
  const std::vector<SegmentEntry>& entries = snapshot.list->segments;
  Place next;
  for (uint32_t slot = 0; slot < layers_.size(); ++slot) {
    if (!HasIndex(slot) || !CanTrain(snapshot, slot)) continue;
    const auto entry = std::find_if(entries.begin(), entries.end(), [&](const SegmentEntry& e) {
      // A segment can lose its codes when the active segment moves after a truncation. A segment
      // without codes is due, even when it was indexed before.
      return coded ? FinalEnd(snapshot, e, slot) > layers_[slot].done_end : !IsCoded(e, slot);
    });
    if (entry == entries.end()) continue;
    const uint32_t end = FinalEnd(snapshot, *entry, slot);
    if (end == 0 || IsCoded(*entry, slot) != coded) continue;
    if (next.entry == nullptr || &*entry < next.entry) next = {&*entry, slot, end};
  }
  return next;
}

absl::StatusOr<bool> LiveSequence::StepForDecode(const Snapshot& snapshot) {
  const Place place = FindNext(snapshot, /*coded=*/false);
  if (place.entry == nullptr) return CodeOpenTail(snapshot);
  RETURN_IF_ERROR(IndexPlace(snapshot, place));
  return true;
}

absl::StatusOr<bool> LiveSequence::StepForUpkeep(const Snapshot& snapshot) {
  if (const Place place = FindNext(snapshot, /*coded=*/true); place.entry != nullptr) {
    RETURN_IF_ERROR(IndexPlace(snapshot, place));
    return true;
  }
  if (snapshot.list->prefill_closed) {  // no more prefill tokens will arrive
    for (uint32_t slot = 0; slot < layers_.size(); ++slot) {
      if (layers_[slot].codebook != nullptr && !layers_[slot].recode_segment_ids.empty()) {
        FinishGeneration(slot);
      }
    }
  }
  auto worked = Recode(snapshot);
  if (!worked.ok() || *worked) return worked;
  worked = Merge(snapshot);
  if (!worked.ok() || *worked) return worked;
  worked = MakeClusters(snapshot);
  if (!worked.ok() || *worked) return worked;
  // Before the end of the prefill, segments may still have to be recoded.
  return snapshot.list->prefill_closed ? ShrinkSegment(*cache_, *sequence_, snapshot)
                                       : TrainAhead(snapshot);
}

LayerTraining LiveSequence::Training(uint32_t layer_slot,
                                     std::span<const SegmentTokens> segments) const {
  const uint32_t layer = cache_->layers.layers[layer_slot].layer;
  return {.layer_slot = layer_slot,
          .index = spec_.index,
          .segments = segments,
          .sink_tokens = spec_.sink_tokens,
          .sample_tokens = sample_tokens_,
          .iterations = 0,
          .seed = MixSeed(MixSeed(spec_.seed, layer), segments.back().tokens.end),
          .first = nullptr,
          .keep_going = go_on_};
}

bool LiveSequence::Drifted(const Place& place) const {
  const Codebook& codebook = *layers_[place.layer_slot].codebook;
  const SegmentTokens tokens{place.entry->rows, {place.begin(), place.token_end}};
  const double inertia = MeasureLayer(*cache_, Training(place.layer_slot, {&tokens, 1}), codebook);
  return HasDrifted(inertia, codebook, cache_->segmenting.drift_ratio);
}

uint32_t LiveSequence::Iterations(uint32_t layer_slot, PositionRange tokens) const {
  if (spec_.iterations > 0) return spec_.iterations;
  return AdaptiveIterations(*cache_, layer_slot, spec_.index, tokens, sample_tokens_);
}

absl::Status LiveSequence::IndexPlace(const Snapshot& snapshot, const Place& place) {
  LayerState& state = layers_[place.layer_slot];
  const uint32_t codebook_tokens = cache_->segmenting.codebook_tokens;
  state.generation_begin = std::min(state.generation_begin, place.begin());  // after a truncation
  state.trained_end = std::max(state.trained_end, state.generation_begin);
  bool train = false;
  if (state.codebook == nullptr) {
    state.generation_begin = place.begin();
    train = true;
  } else if (Drifted(place)) {
    if (!state.mature) FinishGeneration(place.layer_slot);  // the drift ends the generation
    state.generation_begin = place.begin();
    state.mature = false;
    train = true;
  } else if (!state.mature && !IsTail(*place.entry)) {
    train = true;
  } else if (!state.mature) {  // decode segments: each time the generation doubles
    train = place.token_end - state.generation_begin >=
            2 * (state.trained_end - state.generation_begin);
  }
  if (train) {
    RETURN_IF_ERROR(TrainAndCode(snapshot, place));
    if (place.token_end - state.generation_begin >= codebook_tokens || !trains_on_rows_) {
      FinishGeneration(place.layer_slot);
    }
  } else if (!IsCoded(*place.entry, place.layer_slot) ||
             (!state.mature &&
              IndexOf(*place.entry)->codebook(place.layer_slot) != state.codebook)) {
    RETURN_IF_ERROR(CodeAndPublish(place, state.codebook));
  }
  state.done_end = std::max(state.done_end, place.token_end);
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<const Codebook>> LiveSequence::Train(const Snapshot& snapshot,
                                                                    const Place& place) {
  const LayerState& state = layers_[place.layer_slot];
  std::vector<SegmentTokens> segments;
  for (const SegmentEntry& entry : snapshot.list->segments) {
    const uint32_t begin = entry.rows->first_position();
    if (begin < state.generation_begin) continue;
    if (begin >= place.token_end) break;
    const uint32_t end = entry.closed ? entry.token_end : place.token_end;
    segments.push_back({entry.rows, {begin, std::min(end, place.token_end)}});
  }
  ASSIGN_OR_RETURN(auto codebook,
                   NewCodebook(*cache_, place.layer_slot, spec_.index, next_generation_));
  LayerTraining training = Training(place.layer_slot, segments);
  training.first = state.codebook.get();
  training.samples = snapshot.list->SamplesOf(place.layer_slot);
  training.iterations = Iterations(place.layer_slot, {place.begin(), place.token_end});
  // Centroids that were trained on the same generation are already close to the result, unless
  // their sub-spaces were cut in another way.
  const bool is_close = state.generation_begin < place.begin() && state.codebook != nullptr &&
                        state.codebook->header().paired_dims == codebook->header().paired_dims;
  if (is_close) training.iterations = (training.iterations + 1) / 2;
  TrainLayer(*cache_, training, *codebook);
  if (!go_on_()) return Cancelled("the training was given up");
  ++next_generation_;
  return codebook;
}

absl::StatusOr<std::shared_ptr<const Codebook>> LiveSequence::TakeOrTrain(const Snapshot& snapshot,
                                                                          const Place& place) {
  LayerState& state = layers_[place.layer_slot];
  const Ahead ahead = std::exchange(state.ahead, {});
  const bool fits = state.codebook == nullptr && ahead.codebook != nullptr &&
                    ahead.segment_id == place.entry->rows->segment_id() &&
                    ahead.token_end == place.token_end;
  if (fits) return ahead.codebook;
  return Train(snapshot, place);
}

absl::Status LiveSequence::TrainAndCode(const Snapshot& snapshot, const Place& place) {
  LayerState& state = layers_[place.layer_slot];
  ASSIGN_OR_RETURN(std::shared_ptr<const Codebook> codebook, TakeOrTrain(snapshot, place));
  RETURN_IF_ERROR(CodeAndPublish(place, codebook));
  state.codebook = std::move(codebook);
  state.trained_end = place.token_end;
  state.recode_segment_ids.push_back(place.entry->rows->segment_id());
  return absl::OkStatus();
}

LiveSequence::Place LiveSequence::AheadPlace(const Snapshot& snapshot, uint32_t layer_slot) const {
  const SegmentList& list = *snapshot.list;
  if (list.prefill_closed || list.segments.size() != 1 || !list.has_active_segment()) return {};
  const SegmentEntry& entry = list.segments.front();
  const LayerState& state = layers_[layer_slot];
  if (IsTail(entry) || !HasIndex(layer_slot) || state.codebook != nullptr) return {};
  const Place place{&entry, layer_slot, snapshot.layer_tokens[layer_slot]};
  const uint32_t tokens = place.token_end - std::min(place.token_end, place.begin());
  if (tokens < cache_->segmenting.segment_tokens / kAheadParts) return {};
  // A truncation has the rows that follow written in another segment.
  const bool has_ahead = state.ahead.segment_id == entry.rows->segment_id() &&
                         state.ahead.token_end <= place.token_end &&
                         state.ahead.codebook != nullptr;
  const uint32_t trained = has_ahead ? state.ahead.token_end - place.begin() : 0;
  return tokens < 2 * trained ? Place{} : place;
}

absl::StatusOr<bool> LiveSequence::TrainAhead(const Snapshot& snapshot) {
  // More samples may follow, on which the first codebook depends.
  if (std::find(needs_samples_.begin(), needs_samples_.end(), true) != needs_samples_.end()) {
    return false;
  }
  for (uint32_t slot = 0; slot < layers_.size(); ++slot) {
    const Place place = AheadPlace(snapshot, slot);
    if (place.entry == nullptr) continue;
    LayerState& state = layers_[slot];
    state.generation_begin = place.begin();
    state.ahead = {};  // its memory is free for the next one
    auto codebook = Train(snapshot, place);
    // The end of the prefill trains it, or reports that the pool is full.
    if (absl::IsResourceExhausted(codebook.status())) return false;
    if (!codebook.ok()) return codebook.status();
    state.ahead = {*std::move(codebook), place.entry->rows->segment_id(), place.token_end};
    return true;
  }
  return false;
}

void LiveSequence::FinishGeneration(uint32_t layer_slot) {
  LayerState& state = layers_[layer_slot];
  state.mature = true;
  for (const uint64_t segment_id : state.recode_segment_ids) {
    recodings_.push_back({layer_slot, segment_id, state.codebook});
  }
  state.recode_segment_ids.clear();
}

absl::Status LiveSequence::CodeAndPublish(const Place& place,
                                          std::shared_ptr<const Codebook> codebook) {
  const SegmentRows& rows = *place.entry->rows;
  ASSIGN_OR_RETURN(auto layer,
                   CodeLayer(*cache_, place.layer_slot, rows, place.token_end - place.begin(),
                             spec_.sink_tokens, std::move(codebook), go_on_));
  if (!go_on_()) return Cancelled("the coding was given up");
  std::shared_ptr<const SegmentIndex> index;
  if (IndexOf(*place.entry) == nullptr) {
    index = std::make_shared<SegmentIndex>(cache_->layers, spec_.index);
  } else {
    index = place.entry->indexes[ordinal_];
  }
  const IndexedSegment indexed{rows.segment_id(), index->With(place.layer_slot, std::move(layer))};
  return sequence_->PublishIndex(spec_.index, {&indexed, 1});
}

// Codes an active segment that has no codes because it was opened before all layers had codebooks.
absl::StatusOr<bool> LiveSequence::CodeOpenTail(const Snapshot& snapshot) {
  const SegmentList& list = *snapshot.list;
  if (!list.has_active_segment() || !(IsTail(list.segments.back()) || list.prefill_closed))
    return false;
  const uint32_t begin = list.segments.back().rows->first_position();
  for (uint32_t slot = 0; slot < layers_.size(); ++slot) {
    if (!HasIndex(slot)) continue;
    if (layers_[slot].codebook == nullptr) return false;
    for (size_t i = 0; i + 1 < list.segments.size(); ++i) {
      if (!IsCoded(list.segments[i], slot)) return false;
    }
  }
  if (const SegmentIndex* index = IndexOf(list.segments.back());
      index != nullptr && index->all_ready()) {
    return false;
  }
  ASSIGN_OR_RETURN(auto lease, WriteLease::TakeShort(sequence_, SteadyTime::Now() + kWriterWait));
  ASSIGN_OR_RETURN(const auto now, sequence_->Peek());
  const SegmentList& newest = *now->list;
  if (!newest.has_active_segment() ||
      newest.segments.back().rows->segment_id() != list.segments.back().rows->segment_id()) {
    return true;
  }
  const SegmentEntry& tail = newest.segments.back();
  auto index = std::make_shared<const SegmentIndex>(cache_->layers, spec_.index);
  for (uint32_t slot = 0; slot < layers_.size(); ++slot) {
    if (!HasIndex(slot)) continue;
    const uint32_t end = std::max(now->layer_tokens[slot], begin);
    ASSIGN_OR_RETURN(auto layer,
                     CodeOpenLayer(*cache_, slot, *tail.rows, end - begin, layers_[slot].codebook));
    index = index->With(slot, std::move(layer));
  }
  const IndexedSegment indexed{tail.rows->segment_id(), std::move(index)};
  RETURN_IF_ERROR(sequence_->PublishIndex(spec_.index, {&indexed, 1}));
  return true;
}

absl::StatusOr<bool> LiveSequence::Recode(const Snapshot& snapshot) {
  const std::vector<SegmentEntry>& entries = snapshot.list->segments;
  while (!recodings_.empty()) {
    const Recoding recoding = recodings_.front();
    const auto entry = std::find_if(entries.begin(), entries.end(), [&](const SegmentEntry& e) {
      return e.rows->segment_id() == recoding.segment_id;
    });
    const uint32_t slot = recoding.layer_slot;
    const uint32_t end = entry == entries.end() ? 0 : FinalEnd(snapshot, *entry, slot);
    if (end == 0 || !IsCoded(*entry, slot) ||
        IndexOf(*entry)->codebook(slot) == recoding.codebook) {
      recodings_.pop_front();  // merged, truncated, or up to date
      continue;
    }
    RETURN_IF_ERROR(CodeAndPublish({&*entry, slot, end}, recoding.codebook));
    recodings_.pop_front();
    return true;
  }
  return false;
}

std::span<const SegmentEntry> LiveSequence::FindRun(const Snapshot& snapshot) const {
  const SegmentList& list = *snapshot.list;
  const size_t wanted = cache_->segmenting.merge_segments;
  if (wanted < 2) return {};
  uint32_t done_end = snapshot.token_count();
  for (uint32_t slot = 0; slot < layers_.size(); ++slot) {
    if (HasIndex(slot)) done_end = std::min(done_end, layers_[slot].done_end);
  }
  size_t length = 0;
  for (size_t i = 0; i < list.segments.size(); ++i) {
    const SegmentEntry& entry = list.segments[i];
    const bool fit = entry.closed && IsTail(entry) && entry.token_end <= done_end &&
                     entry.rows->user_count() <= 1 &&  // else a merge holds tokens twice
                     std::all_of(entry.indexes.begin(), entry.indexes.end(), [](const auto& index) {
                       return index != nullptr && index->all_ready();
                     });
    length = fit ? length + 1 : 0;
    if (length == wanted) return std::span(list.segments).subspan(i + 1 - wanted, wanted);
  }
  return {};
}

absl::StatusOr<bool> LiveSequence::Merge(const Snapshot& snapshot) {
  const std::span<const SegmentEntry> run = FindRun(snapshot);
  if (run.empty()) return false;
  const uint32_t begin = run.front().rows->first_position();
  uint32_t first_indexed = 0;  // all segments of the run have an index, so there is one
  while (!HasIndex(first_indexed)) ++first_indexed;
  ASSIGN_OR_RETURN(auto merged,
                   MergeSegments(*cache_, {.run = run,
                                           .sink_tokens = spec_.sink_tokens,
                                           .sample_tokens = sample_tokens_,
                                           .iterations = Iterations(first_indexed,
                                                                    {begin, run.back().token_end}),
                                           .seed = spec_.seed,
                                           .new_generation = next_generation_,
                                           .drift_ratio = cache_->segmenting.drift_ratio,
                                           .keep_going = go_on_}));
  std::vector<uint64_t> segment_ids;
  for (const SegmentEntry& entry : run) segment_ids.push_back(entry.rows->segment_id());
  const std::shared_ptr<const SegmentIndex> index = merged.indexes[ordinal_];
  RETURN_IF_ERROR(sequence_->ReplaceSegments(segment_ids, {std::move(merged)}));
  for (uint32_t slot = 0; slot < layers_.size(); ++slot) {
    const auto& codebook = index->codebook(slot);
    if (codebook == nullptr) continue;
    if (codebook->header().codebook_generation != next_generation_) continue;
    layers_[slot] = {.codebook = codebook,
                     .generation_begin = begin,
                     .trained_end = run.back().token_end,
                     .mature = false,
                     .done_end = layers_[slot].done_end,
                     .recode_segment_ids = {},
                     .ahead = {}};
  }
  ++next_generation_;
  return true;
}

absl::StatusOr<bool> LiveSequence::MakeClusters(const Snapshot& snapshot) {
  const SegmentList& list = *snapshot.list;
  for (size_t i = 0; i < list.indexes.size(); ++i) {
    if (list.indexes[i].kind != IndexKind::kClusters) continue;
    for (const SegmentEntry& entry : list.segments) {
      const std::shared_ptr<const SegmentIndex>& index = entry.indexes[i];
      if (!entry.closed || index == nullptr || !index->all_ready()) continue;
      const uint32_t begin = entry.rows->first_position();
      auto made = index;
      for (uint32_t slot = 0; slot < layers_.size(); ++slot) {
        if (!HasIndex(slot)) continue;
        const IndexDataHeader& header = index->header(slot);
        if (header.counted_end.load() != 0 || FinalEnd(snapshot, entry, slot) == 0) continue;
        ASSIGN_OR_RETURN(auto layer,
                         CodeLayer(*cache_, slot, *entry.rows, entry.token_end - begin,
                                   begin + header.counted_begin, index->codebook(slot), go_on_));
        made = made->With(slot, std::move(layer));
      }
      if (made == index) continue;
      const IndexedSegment indexed{entry.rows->segment_id(), std::move(made)};
      RETURN_IF_ERROR(sequence_->PublishIndex(list.indexes[i], {&indexed, 1}));
      return true;
    }
  }
  return false;
}

}  // namespace pqcached::kvstore

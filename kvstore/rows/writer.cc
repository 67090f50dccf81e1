#include "kvstore/rows/writer.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <functional>
#include <limits>

#include "absl/strings/str_cat.h"
#include "kernels/base/status_macros.h"
#include "kernels/train/pq_encode.h"
#include "kvstore/memory/durable_store.h"
#include "kvstore/read/indexes/index_types.h"
#include "kvstore/refusal.h"

namespace pqcached::kvstore {
namespace {

// Number of bytes below which a copy finishes before other threads would wake up.
constexpr size_t kParallelBytes = size_t{256} << 10;
constexpr uint32_t kParallelEncodeTokens = 64;
constexpr uint32_t kTileTokens = 64;  // a few hundred KiB over all heads of a layer

ParallelFor ParallelIf(bool worthwhile, Arena& arena) {
  return worthwhile ? arena.parallel_for() : SerialFor();
}

// Returns the codebooks for a new segment: those of the previous segment, for each index that it
// has ready in all layers.
NewestCodebooks CodebooksOf(const SegmentEntry& before) {
  NewestCodebooks codebooks;
  for (const auto& index : before.indexes) {
    codebooks.emplace_back();
    if (index != nullptr && index->all_ready()) codebooks.back() = index->codebooks();
  }
  return codebooks;
}

void CopySlots(const StoredLayers& layers, const SegmentEntry& from, const SegmentEntry& to,
               const std::vector<uint32_t>& layer_tokens) {
  const uint32_t first = from.rows->first_position();
  for (uint32_t slot = 0; slot < layers.size(); ++slot) {
    const StoredLayers::Layer& layer = layers.layers[slot];
    const uint32_t tokens = layer_tokens[slot] > first ? layer_tokens[slot] - first : 0;
    for (uint32_t head = layer.first_head; head < layer.first_head + layer.shape.kv_heads; ++head) {
      PQC_CRASH_POINT();
      std::memcpy(to.rows->rows(head), from.rows->rows(head),
                  size_t{tokens} * layer.shape.row_bytes);
    }
  }
}

}  // namespace

absl::StatusOr<CheckedRows> CheckRows(const Cache& cache, const LayerRows& rows) {
  ASSIGN_OR_RETURN(const uint32_t layer_slot, cache.LayerSlot(rows.layer));
  const LayerShape& shape = cache.layers.layers[layer_slot].shape;
  CheckedTensor keys;
  if (shape.has_keys()) {
    ASSIGN_OR_RETURN(keys, CheckTensor(rows.keys, shape.kv_heads, shape.key_dim, "keys"));
  }
  ASSIGN_OR_RETURN(const auto values,
                   CheckTensor(rows.values, shape.kv_heads, shape.value_dim, "values"));
  if (!shape.has_keys()) {
    const std::vector<uint64_t> no_dims = {values.shape[0], shape.kv_heads, 0};
    if (!rows.keys.shape.empty() && rows.keys.shape != no_dims) {
      return InvalidArgument(
          "keys", absl::StrCat("must be absent: layer ", rows.layer, " stores values only"));
    }
  } else if (keys.shape[0] != values.shape[0]) {
    return InvalidArgument("values.shape", absl::StrCat("layer ", rows.layer, ": ", values.shape[0],
                                                        " tokens; keys have ", keys.shape[0]));
  }
  return CheckedRows{.layer_slot = layer_slot,
                     .token_count = static_cast<uint32_t>(values.shape[0]),
                     .keys = keys,
                     .values = values};
}

absl::StatusOr<RangeKind> ClassifyRange(uint64_t first_position, uint32_t token_count,
                                        uint32_t stored, uint32_t layer) {
  if (first_position > kMaxSequenceTokens || first_position + token_count > kMaxSequenceTokens) {
    return OutOfRange("first_position",
                      absl::StrCat(first_position, " with ", token_count,
                                   " tokens; a sequence has at most ", kMaxSequenceTokens));
  }
  if (first_position + token_count <= stored) return RangeKind::kRepeat;
  if (first_position == stored) return RangeKind::kNew;
  return InvalidArgument("first_position",
                         absl::StrCat(first_position, " with ", token_count, " tokens: ",
                                      first_position > stored ? "a gap" : "partly stored",
                                      "; layer ", layer, " continues at ", stored));
}

absl::StatusOr<SegmentWriter> SegmentWriter::Begin(std::shared_ptr<const Cache> cache,
                                                   WriteLease lease, uint32_t segment_tokens) {
  ASSIGN_OR_RETURN(auto base, lease.sequence().Read());
  return SegmentWriter(std::move(cache), std::move(lease), std::move(base), segment_tokens);
}

SegmentWriter::SegmentWriter(std::shared_ptr<const Cache> cache, WriteLease lease,
                             std::shared_ptr<const Snapshot> base, uint32_t segment_tokens)
    : cache_(std::move(cache)),
      lease_(std::move(lease)),
      base_(std::move(base)),
      segment_tokens_(segment_tokens),
      kept_(base_->list->segments.size()),
      layer_tokens_(base_->layer_tokens) {}

void SegmentWriter::ClosePrefill() {
  const SegmentRows* tail = base_->list->tail();
  const bool is_tail = tail == nullptr || cache_->segmenting.IsTail(tail->slot_capacity());
  if (base_->list->prefill_closed || is_tail) return;
  SegmentEntry& open = EditActiveSegment();
  open.closed = true;
  open.token_end = layer_tokens_.front();
  closes_prefill_ = true;
}

SegmentEntry& SegmentWriter::EditActiveSegment() {
  if (edited_.empty()) edited_.push_back(base_->list->segments[--kept_]);
  return edited_.back();
}

// Moves the open segment to fresh memory if readers of older snapshots, sharing sequences or leases
// may still read slots that are about to be written.
absl::Status SegmentWriter::MoveFromReaders() {
  if (readers_checked_) return absl::OkStatus();
  if (!base_->list->has_active_segment() || !lease_.sequence().HasReadersBeyond(layer_tokens_)) {
    readers_checked_ = true;  // older snapshots get no new readers
    return absl::OkStatus();
  }
  SegmentEntry& old = EditActiveSegment();
  const NewSegment same{.segment_id = cache_->counters.next_segment_id++,
                        .first_position = old.rows->first_position(),
                        .slot_capacity = old.rows->slot_capacity()};
  ASSIGN_OR_RETURN(auto created,
                   CreateSegments(*cache_->pool, cache_->layers, {&same, 1}, CodebooksOf(old)));
  SegmentEntry& fresh = created.front();
  CopySlots(cache_->layers, old, fresh, layer_tokens_);
  for (size_t i = 0; i < old.indexes.size(); ++i) {
    if (fresh.indexes[i] == nullptr) continue;
    for (uint32_t slot = 0; slot < cache_->layers.size(); ++slot) {
      if (!cache_->layers.layers[slot].shape.has_index()) continue;
      const IndexDataHeader& from = old.indexes[i]->header(slot);
      if (BuiltTypeOf(from.index).ClosesLater()) continue;  // it has no codes of single rows
      IndexDataHeader& to = fresh.indexes[i]->header(slot);
      for (uint32_t kv_head = 0; kv_head < from.kv_head_count; ++kv_head) {
        PQC_CRASH_POINT();
        BuiltTypeOf(from.index).CopyCodes(from, kv_head, from.slot_capacity, /*first_slot=*/0, &to);
      }
    }
  }
  old = std::move(fresh);
  readers_checked_ = true;
  return absl::OkStatus();
}

absl::StatusOr<std::vector<SegmentEntry>> SegmentWriter::Create(uint32_t first, uint32_t token_end,
                                                                uint32_t slots_end) const {
  std::vector<NewSegment> wanted;
  while (first < token_end) {
    const uint32_t tokens =
        is_prefill_ ? cache_->segmenting.PrefillTokens(first, slots_end) : segment_tokens_;
    wanted.push_back({.segment_id = cache_->counters.next_segment_id++,
                      .first_position = first,
                      .slot_capacity = tokens});
    first += tokens;
  }
  const size_t indexes = base_->list->indexes.size();
  return CreateSegments(
      *cache_->pool, cache_->layers, wanted,
      defer_encoding_ ? NewestCodebooks(indexes) : NewestOf(base_->list->segments, indexes));
}

absl::StatusOr<std::vector<SegmentEntry>> SegmentWriter::CreateNext(const SegmentEntry* last,
                                                                    uint32_t first,
                                                                    uint32_t token_end) const {
  // A short segment that is full shows that the tokens are announced piece by piece.
  const SegmentingOptions& options = cache_->segmenting;
  const uint32_t capacity = last == nullptr || last->closed ? 0 : last->rows->slot_capacity();
  const bool in_pieces =
      capacity > 0 && capacity < options.segment_tokens && !options.IsTail(capacity);
  const bool is_known = token_end <= announced_.most && !in_pieces;
  // Segments double when the end is unknown: an open prefill holds at most twice its rows.
  const uint32_t most = is_known ? announced_.most : std::max(token_end, 2 * first);
  const uint32_t least = is_known ? std::max(announced_.least, token_end) : token_end;
  auto created = Create(first, token_end, most);
  const bool is_full = is_prefill_ && absl::IsResourceExhausted(created.status());
  return is_full && least < most ? Create(first, token_end, least) : std::move(created);
}

absl::Status SegmentWriter::Reserve(uint32_t token_end) {
  RETURN_IF_ERROR(MoveFromReaders());
  const SegmentEntry* last = entry_count() == 0 ? nullptr : &entry(entry_count() - 1);
  uint32_t capacity_end = 0;
  if (last != nullptr) capacity_end = last->closed ? last->token_end : last->rows->end_capacity();
  if (token_end <= capacity_end) return absl::OkStatus();
  ASSIGN_OR_RETURN(auto created, CreateNext(last, capacity_end, token_end));
  const auto close = [](SegmentEntry& full) {
    full.closed = true;
    full.token_end = full.rows->end_capacity();
  };
  if (last != nullptr && !last->closed) close(EditActiveSegment());
  for (SegmentEntry& fresh : created) {
    if (&fresh != &created.back()) close(fresh);
    edited_.push_back(std::move(fresh));
  }
  return absl::OkStatus();
}

size_t SegmentWriter::SegmentAt(uint32_t position) const {
  if (!edited_.empty() && edited_.front().rows->first_position() <= position) {
    size_t i = edited_.size() - 1;
    while (edited_[i].rows->first_position() > position) --i;
    return kept_ + i;
  }
  const auto begin = base_->list->segments.begin();
  const auto it = std::upper_bound(begin, begin + static_cast<ptrdiff_t>(kept_), position,
                                   [](uint32_t wanted, const SegmentEntry& candidate) {
                                     return wanted < candidate.rows->first_position();
                                   });
  return static_cast<size_t>(it - begin) - 1;
}

// Threads share the work by tiles of tokens, not by heads: the source of a tile, [tokens, heads,
// dim], is contiguous and is read in memory order.
kernels::IngestResult SegmentWriter::WriteTile(const CheckedRows& rows, const SegmentRows& segment,
                                               Tile tile) const {
  const StoredLayers::Layer& layer = cache_->layers.layers[rows.layer_slot];
  const LayerShape& shape = layer.shape;
  std::array<std::byte*, kMaxKvHeads> targets;
  for (uint32_t head = 0; head < shape.kv_heads; ++head) {
    targets[head] = segment.rows(layer.first_head + head) + size_t{tile.slot} * shape.row_bytes;
  }
  PQC_CRASH_POINT();
  return WriteTo(rows, tile.token, tile.token_count, {targets.data(), shape.kv_heads});
}

kernels::IngestResult SegmentWriter::WriteTo(const CheckedRows& rows, uint32_t token,
                                             uint32_t token_count,
                                             std::span<std::byte* const> targets) const {
  const LayerShape& shape = cache_->layers.layers[rows.layer_slot].shape;
  return kernels::IngestHeads(
      cache_->compute.exec,
      {.token_count = token_count,
       .key_dim = shape.key_dim,
       .value_dim = shape.value_dim,
       .key = shape.has_keys() ? rows.keys.Head(token, 0) : kernels::StridedTensor(),
       .key_head_stride_bytes = rows.keys.strides_bytes[1],
       .value = rows.values.Head(token, 0),
       .value_head_stride_bytes = rows.values.strides_bytes[1],
       .row_dtype = shape.dtype,
       .row_stride_bytes = shape.row_bytes,
       .rows = targets});
}

absl::Status SegmentWriter::Write(const CheckedRows& rows) {
  const StoredLayers::Layer& layer = cache_->layers.layers[rows.layer_slot];
  const LayerShape& shape = layer.shape;
  const uint32_t begin = layer_tokens_[rows.layer_slot];
  const uint32_t end = begin + rows.token_count;
  const ParallelFor parallel =
      ParallelIf(size_t{rows.token_count} * shape.row_bytes * shape.kv_heads >= kParallelBytes,
                 cache_->compute.serving);
  for (uint32_t position = begin; position < end;) {
    const SegmentRows& segment = *entry(SegmentAt(position)).rows;
    const uint32_t slot = position - segment.first_position();
    const uint32_t count = std::min(end, segment.end_capacity()) - position;
    const uint32_t tiles = (count + kTileTokens - 1) / kTileTokens;
    results_.resize(tiles);
    const auto write_tile = [&](uint32_t tile, uint32_t) {
      const uint32_t first = tile * kTileTokens;
      results_[tile] = WriteTile(rows, segment,
                                 {.token = position - begin + first,
                                  .slot = slot + first,
                                  .token_count = std::min(kTileTokens, count - first)});
    };
    parallel.run(tiles, std::cref(write_tile));  // by reference: a copy would allocate
    for (uint32_t tile = 0; tile < tiles; ++tile) {
      const kernels::IngestResult& result = results_[tile];
      if (result.ok()) continue;
      return InvalidArgument(
          result.bad_part == kernels::IngestPart::kKey ? "keys" : "values",
          absl::StrCat("layer ", layer.layer, ": token ",
                       position + tile * kTileTokens + result.bad_token, " has NaN or infinity as ",
                       kernels::DTypeName(shape.dtype)));
    }
    position += count;
  }
  layer_tokens_[rows.layer_slot] = end;
  return absl::OkStatus();
}

void SegmentWriter::EncodeNew() {
  // One task per kv head of every layer; a task encodes all its segments and indexes.
  size_t scratch_bytes = 0;
  uint32_t max_tokens = 0;
  for (uint32_t slot = 0; slot < cache_->layers.size(); ++slot) {
    const StoredLayers::Layer& layer = cache_->layers.layers[slot];
    if (!layer.shape.has_index()) continue;
    max_tokens = std::max(max_tokens, layer_tokens_[slot] - base_->layer_tokens[slot]);
    for (const IndexDescriptor& index : base_->list->indexes) {
      scratch_bytes =
          std::max(scratch_bytes, BuiltTypeOf(index).EncodeScratchBytes(index, layer.shape));
    }
  }
  scratch_bytes = (scratch_bytes + 63) / 64 * 64;
  const ParallelFor parallel =
      ParallelIf(max_tokens >= kParallelEncodeTokens, cache_->compute.serving);
  const ScratchPool::Buffer scratch =
      cache_->compute.scratch.Take(parallel.worker_count * scratch_bytes);
  const auto encode_head = [&](uint32_t head, uint32_t worker) {
    EncodeHead(head, scratch.bytes().subspan(worker * scratch_bytes, scratch_bytes));
  };
  parallel.run(cache_->layers.head_count, std::cref(encode_head));
}

void SegmentWriter::EncodeHead(uint32_t head, std::span<std::byte> scratch) const {
  const uint32_t slot = cache_->layers.SlotOfHead(head);
  const StoredLayers::Layer& layer = cache_->layers.layers[slot];
  if (!layer.shape.has_index()) return;
  const uint32_t end = layer_tokens_[slot];
  for (uint32_t position = base_->layer_tokens[slot]; position < end;) {
    const SegmentEntry& at = entry(SegmentAt(position));
    const uint32_t first = at.rows->first_position();
    const uint32_t piece_end = std::min(end, at.closed ? at.token_end : at.rows->end_capacity());
    for (const auto& index : at.indexes) {
      if (index == nullptr) continue;
      EncodeSlots(cache_->compute.exec, layer, *at.rows, *index, slot, head - layer.first_head,
                  {position - first, piece_end - first}, scratch);
    }
    position = piece_end;
  }
}

void SegmentWriter::CountClosed() {
  const auto count_layer = [this](uint32_t slot, uint32_t) { CountLayer(slot); };
  // Most appends close no segment, and then there is nothing to count.
  const ParallelFor parallel =
      ParallelIf(entry_count() > base_->list->segments.size(), cache_->compute.serving);
  parallel.run(cache_->layers.size(), std::cref(count_layer));
}

// Counts the segments that are closed and, with this commit, complete in the layer.
void SegmentWriter::CountLayer(uint32_t layer_slot) const {
  const uint32_t begin = base_->layer_tokens[layer_slot];
  const uint32_t end = layer_tokens_[layer_slot];
  for (size_t i = entry_count(); i-- > 0;) {
    const SegmentEntry& full = entry(i);
    if (!full.closed || full.token_end > end) continue;
    if (i < kept_ && full.token_end <= begin) break;
    const uint32_t slot_end = full.token_end - full.rows->first_position();
    for (const auto& index : full.indexes) {
      if (index == nullptr || !index->ready(layer_slot)) continue;  // its builder counts it
      if (index->header(layer_slot).counted_end.load() > 0) continue;
      if (BuiltTypeOf(index->index()).ClosesLater()) continue;
      CloseLayer(cache_->compute, cache_->layers.layers[layer_slot], *full.rows, *index, layer_slot,
                 slot_end);
    }
  }
}

absl::Status SegmentWriter::AddSamples(uint32_t layer_slot,
                                       std::shared_ptr<const QuerySamples> newer) {
  if (samples_.empty()) {
    samples_ = base_->list->samples;
    samples_.resize(cache_->layers.size());
  }
  std::shared_ptr<const QuerySamples>& samples = samples_[layer_slot];
  if (samples == nullptr) {
    samples = std::move(newer);
    return absl::OkStatus();
  }
  ASSIGN_OR_RETURN(
      samples, QuerySamples::Merge(*cache_->pool, cache_->layers.layers[layer_slot].shape, *samples,
                                   *newer));
  return absl::OkStatus();
}

absl::StatusOr<uint64_t> SegmentWriter::Commit() {
  if (!base_->list->indexes.empty()) {
    EncodeNew();
    CountClosed();
  }
  const uint64_t token_count = *std::min_element(layer_tokens_.begin(), layer_tokens_.end());
  Sequence& sequence = lease_.sequence();
  absl::Status status;
  if (edited_.empty() && samples_.empty()) {
    status = sequence.PublishRows(std::move(layer_tokens_));
  } else {
    const uint32_t begin = edited_.empty() ? std::numeric_limits<uint32_t>::max()
                                           : edited_.front().rows->first_position();
    status = sequence.PublishRows(std::move(layer_tokens_), {begin, std::move(edited_),
                                                             closes_prefill_, std::move(samples_)});
  }
  if (!status.ok()) return status;
  return token_count;
}

}  // namespace pqcached::kvstore

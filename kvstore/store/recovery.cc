#include "kvstore/store/recovery.h"

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/base/crc32c.h"
#include "kvstore/checksum/verify.h"
#include "kvstore/index/live_index.h"
#include "kvstore/read/indexes/index_types.h"
#include "kvstore/records/names_record.h"
#include "kvstore/records/record_bytes.h"

namespace pqcached::kvstore {
namespace {

// Number of the layer's record per layer slot; EntryRecord::kNoLayer where not ready.
using LayerNumbers = std::vector<uint32_t>;

// A sequence as read from the records.
struct Draft {
  SequenceIdentity identity;
  std::shared_ptr<const RecordSlot> slot;
  StateRecord state;
  std::vector<uint32_t> layer_tokens;
  SegmentList list;                                           // entries without indexes
  std::vector<std::vector<LayerNumbers>> layer_numbers;       // [entry][index]
  bool is_complete_list = true;                               // no part of the list was left out
  std::vector<std::shared_ptr<const SegmentIndex>> unlisted;  // complete parts that were
  std::unique_ptr<NamesRecord> names;
  NameWords name_words;
  std::vector<std::shared_ptr<const ActiveSegmentView>> views;
};

class CacheRecovery {
 public:
  explicit CacheRecovery(const Cache& cache) : cache_(cache), table_(*cache.records) {}

  RecoveredCache Run();

 private:
  void Drop(uint64_t sequence_id, absl::string_view what);
  std::optional<Draft> ReadDraft(uint32_t number);
  bool ReadState(uint32_t number, Draft& draft);
  bool ReadList(Draft& draft);
  bool ReadEntry(RecordReader& reader, Draft& draft);
  bool CheckIndexes(const std::vector<IndexDescriptor>& indexes) const;
  void LeaveOut(const Draft& draft, const IndexDescriptor& index);
  // Returns whether the index exists and fits the layers. One of a plug-in that is another one now
  // is left out, and the rows stay.
  bool IsUsable(const IndexDescriptor& index) const;

  std::shared_ptr<const SegmentRows> RowsOf(uint32_t number);
  std::shared_ptr<const SegmentRows> ReadRows(uint32_t number);
  SegmentIndex::Layer LayerOf(uint32_t number, const LayerRecord& wanted);
  SegmentIndex::Layer MakeLayer(uint32_t number, const LayerRecord& record);
  std::shared_ptr<const Codebook> CodebookOf(const LayerRecord& record, const LayerShape& shape);

  void RecoverIndexes(Draft& draft);
  std::shared_ptr<const SegmentIndex> IndexOf(const SegmentRows& rows,
                                              const IndexDescriptor& descriptor,
                                              const LayerNumbers& numbers);
  void PinTails(std::vector<Draft>& drafts);
  RecoveredSequence Build(Draft draft);

  const Cache& cache_;
  RecordTable& table_;
  RecoveredCache recovered_;
  std::set<uint64_t> sequence_ids_;
  std::map<uint32_t, std::shared_ptr<const SegmentRows>> rows_;  // by number; null: broken
  std::map<uint32_t, SegmentIndex::Layer> layers_;               // by number; without data: broken
  std::map<uint32_t, std::shared_ptr<const Codebook>> codebooks_;  // by unit; null: broken
  std::map<std::pair<uint64_t, LayerNumbers>, std::shared_ptr<const SegmentIndex>> indexes_;
  std::map<const SegmentRows*, size_t> owners_;  // of open segments: ordinal of their draft
};

RecoveredCache CacheRecovery::Run() {
  std::vector<Draft> drafts;
  for (uint32_t number = 0; number < table_.end(RecordKind::kSequence); ++number) {
    auto draft = ReadDraft(number);
    if (!draft.has_value()) continue;
    const SegmentRows* tail = draft->list.tail();
    if (tail != nullptr && !owners_.emplace(tail, drafts.size()).second) {
      Drop(draft->identity.sequence_id, "another sequence writes its open segment");
      continue;
    }
    drafts.push_back(*std::move(draft));
  }
  for (Draft& draft : drafts) RecoverIndexes(draft);
  PinTails(drafts);
  for (Draft& draft : drafts) recovered_.sequences.push_back(Build(std::move(draft)));
  for (const auto& [number, rows] : rows_) recovered_.segments += rows != nullptr ? 1 : 0;
  rows_.clear();  // extents that no sequence holds become quarantined
  layers_.clear();
  codebooks_.clear();
  indexes_.clear();
  table_.EndRecovery();
  cache_.pool->BeginQuarantine();
  return std::move(recovered_);
}

void CacheRecovery::Drop(uint64_t sequence_id, absl::string_view what) {
  recovered_.dropped.push_back(absl::StrCat("sequence ", sequence_id, ": ", what));
}

// Reports an index of a plug-in that is not here, is switched off, or is another one now.
void CacheRecovery::LeaveOut(const Draft& draft, const IndexDescriptor& index) {
  const char* why = "its plug-in is switched off";
  if (FindIndexType(index) == nullptr) why = "its plug-in is not loaded";
  if (IsBuilt(index)) why = "its plug-in has no such index any more";
  Drop(draft.identity.sequence_id,
       absl::StrCat("index ", NameOf(index), " is left out, because ", why, "; the rows stay"));
}

std::optional<Draft> CacheRecovery::ReadDraft(uint32_t number) {
  const SlotArray::Content content = table_.identities().Read(number);
  if (content.state == SlotArray::State::kEmpty) return std::nullopt;
  Draft draft;
  const auto drop = [&](absl::string_view what) {
    Drop(draft.identity.sequence_id, what);
    return std::nullopt;
  };
  if (content.state != SlotArray::State::kFull) return drop("its identity is corrupt");
  auto identity = ReadIdentity(content.bytes);
  if (!identity.has_value()) return drop("its identity cannot be read");
  draft.identity = *std::move(identity);
  if (!sequence_ids_.insert(draft.identity.sequence_id).second) {
    return drop("another sequence has its id");
  }
  if (auto& live = draft.identity.live_index;
      live.has_value() && IsPlugin(live->index) && !IsUsable(live->index)) {
    LeaveOut(draft, live->index);
    live.reset();
  }
  if (const auto& live = draft.identity.live_index;
      live.has_value() && !CheckLiveIndex(cache_, *live).ok()) {
    return drop("its live index does not suit the cache");
  }
  if (!ReadState(number, draft)) return drop("its state is corrupt");
  if (!ReadList(draft)) return drop("its list of segments is corrupt");
  auto slot = table_.Claim(RecordKind::kSequence, number);
  if (!slot.has_value()) return drop("its slot is in use");
  draft.slot = std::make_shared<const RecordSlot>(*std::move(slot));
  draft.names = std::make_unique<NamesRecord>(cache_.records, draft.slot);
  bool broken = false;
  draft.name_words = draft.names->Recover(broken);
  if (broken) Drop(draft.identity.sequence_id, "its names are corrupt; the sequence stays");
  return draft;
}

// Reads the newer of the two states. If one of them is corrupt, it may be the newer one, so neither
// is used.
bool CacheRecovery::ReadState(uint32_t number, Draft& draft) {
  for (const uint32_t turn : {0u, 1u}) {
    const SlotArray::Content content = table_.states().Read(2 * number + turn);
    if (content.state == SlotArray::State::kEmpty) continue;  // killed while writing it
    if (content.state == SlotArray::State::kBroken) return false;
    RecordReader reader(content.bytes);
    const auto state = reader.Get<StateRecord>();
    auto layer_tokens = reader.GetAll<uint32_t>(cache_.layers.size());
    if (!reader.done() || state.layer_count != cache_.layers.size() || state.generation == 0) {
      return false;
    }
    if (state.generation <= draft.state.generation) continue;
    draft.state = state;
    draft.layer_tokens = std::move(layer_tokens);
  }
  return draft.state.generation > 0;
}

bool CacheRecovery::IsUsable(const IndexDescriptor& index) const {
  if (!IsBuilt(index)) return false;
  return std::all_of(cache_.layers.layers.begin(), cache_.layers.layers.end(),
                     [&](const StoredLayers::Layer& layer) {
                       return !layer.shape.has_index() ||
                              ValidateIndex(index, layer.shape.key_dim, "index").ok();
                     });
}

bool CacheRecovery::CheckIndexes(const std::vector<IndexDescriptor>& indexes) const {
  for (size_t i = 0; i < indexes.size(); ++i) {
    if (!IsBuilt(indexes[i]) && !IsPlugin(indexes[i])) return false;
    if (std::find(indexes.begin(), indexes.begin() + static_cast<ptrdiff_t>(i), indexes[i]) !=
        indexes.begin() + static_cast<ptrdiff_t>(i)) {
      return false;
    }
    if (!IsPlugin(indexes[i]) && !IsUsable(indexes[i])) return false;
  }
  return true;
}

bool CacheRecovery::ReadList(Draft& draft) {
  const StateRecord& state = draft.state;
  const uint32_t most = *std::max_element(draft.layer_tokens.begin(), draft.layer_tokens.end());
  if (!state.list.valid()) return most == 0;
  if (!table_.ClaimBlock(state.list)) return false;
  const std::span<const std::byte> block = table_.bytes(state.list);
  bool good = state.list_bytes <= block.size() &&
              kernels::Crc32c(table_.exec(), block.first(state.list_bytes)) == state.list_crc;
  RecordReader reader(good ? block.first(state.list_bytes) : block.first(0));
  const auto head = reader.Get<ListRecord>();
  if (head.index_count <= kMaxIndexes) {
    draft.list.indexes = reader.GetAll<IndexDescriptor>(head.index_count);
  }
  draft.list.prefill_closed = head.prefill_closed != 0;
  good = good && reader.ok() && head.index_count <= kMaxIndexes && head.entry_count > 0 &&
         CheckIndexes(draft.list.indexes);
  for (uint32_t i = 0; good && i < head.entry_count; ++i) good = ReadEntry(reader, draft);
  good = good && reader.done();
  if (good) {
    const SegmentEntry& last = draft.list.segments.back();
    good = most <= (last.closed ? last.token_end : last.rows->end_capacity());
  }
  if (!good) {
    const MutexLock lock(&table_.mutex());
    table_.FreeBlock(state.list);
  }
  return good;
}

bool CacheRecovery::ReadEntry(RecordReader& reader, Draft& draft) {
  const auto record = reader.Get<EntryRecord>();
  std::vector<LayerNumbers> numbers;
  for (size_t i = 0; i < draft.list.indexes.size(); ++i) {
    numbers.push_back(reader.GetAll<uint32_t>(cache_.layers.size()));
  }
  if (!reader.ok()) return false;
  std::vector<SegmentEntry>& segments = draft.list.segments;
  if (!segments.empty() && !segments.back().closed) return false;  // only the last may be open
  const uint32_t begin = segments.empty() ? 0 : segments.back().token_end;
  auto rows = RowsOf(record.rows);
  if (rows == nullptr || rows->segment_id() != record.segment_id ||
      rows->first_position() != begin || record.closed > 1) {
    return false;
  }
  const bool is_open = record.closed == 0;
  if (is_open ? record.token_end != 0
              : record.token_end <= begin || record.token_end > rows->end_capacity()) {
    return false;
  }
  segments.push_back(
      {.rows = std::move(rows), .indexes = {}, .closed = !is_open, .token_end = record.token_end});
  draft.layer_numbers.push_back(std::move(numbers));
  return true;
}

std::shared_ptr<const SegmentRows> CacheRecovery::RowsOf(uint32_t number) {
  const auto known = rows_.find(number);
  if (known != rows_.end()) return known->second;
  return rows_[number] = ReadRows(number);
}

std::shared_ptr<const SegmentRows> CacheRecovery::ReadRows(uint32_t number) {
  if (number >= table_.rows().count()) return nullptr;
  const SlotArray::Content content = table_.rows().Read(number);
  if (content.state != SlotArray::State::kFull) return nullptr;
  RecordReader reader(content.bytes);
  const auto record = reader.Get<RowsRecord>();
  const auto refs = reader.GetAll<ExtentRef>(cache_.layers.head_count);
  if (!reader.done() || record.head_count != cache_.layers.head_count ||
      record.slot_capacity == 0 || record.slot_capacity % kBlockTokens != 0 ||
      record.slot_capacity > kMaxSequenceTokens || record.first_position > kMaxSequenceTokens) {
    return nullptr;
  }
  std::vector<Extent> extents;
  for (uint32_t head = 0; head < refs.size(); ++head) {
    const LayerShape& shape = cache_.layers.layers[cache_.layers.SlotOfHead(head)].shape;
    auto extent = cache_.pool->Claim(refs[head], size_t{record.slot_capacity} * shape.row_bytes);
    if (!extent.has_value()) return nullptr;
    extents.push_back(*std::move(extent));
  }
  auto slot = table_.Claim(RecordKind::kRows, number);
  if (!slot.has_value()) return nullptr;
  auto rows = std::make_shared<const SegmentRows>(record.segment_id, record.first_position,
                                                  record.slot_capacity, std::move(extents));
  rows->record() = *std::move(slot);
  if (!LoadRowChecksums(cache_, number, *rows)) {
    recovered_.dropped.push_back(
        absl::StrCat("segment ", record.segment_id, ": the checksums of its rows are corrupt"));
  }
  return rows;
}

SegmentIndex::Layer CacheRecovery::LayerOf(uint32_t number, const LayerRecord& wanted) {
  if (number >= table_.layers().count()) return {};
  const SlotArray::Content content = table_.layers().Read(number);
  if (content.state != SlotArray::State::kFull) return {};
  RecordReader reader(content.bytes);
  const auto record = reader.Get<LayerRecord>();
  if (!reader.done() || record.segment_id != wanted.segment_id || record.index != wanted.index ||
      record.layer_slot != wanted.layer_slot || record.slot_capacity != wanted.slot_capacity) {
    return {};
  }
  const auto known = layers_.find(number);
  if (known != layers_.end()) return known->second;
  return layers_[number] = MakeLayer(number, record);
}

SegmentIndex::Layer CacheRecovery::MakeLayer(uint32_t number, const LayerRecord& record) {
  const LayerShape& shape = cache_.layers.layers[record.layer_slot].shape;
  auto codebook = CodebookOf(record, shape);
  if (codebook == nullptr) return {};
  auto extent = cache_.pool->Claim(
      record.data, SegmentIndex::LayerBytes(record.index, shape, record.slot_capacity));
  if (!extent.has_value()) return {};
  auto layer = SegmentIndex::RecoverLayer(shape, record.slot_capacity, *std::move(extent),
                                          std::move(codebook));
  auto slot = layer.data == nullptr ? std::nullopt : table_.Claim(RecordKind::kLayer, number);
  if (!slot.has_value()) return {};
  layer.data->record() = *std::move(slot);
  if (!LoadLayerChecksums(cache_, number, record.segment_id, record.layer_slot, layer)) {
    recovered_.dropped.push_back(absl::StrCat("segment ", record.segment_id, ", layer ",
                                              cache_.layers.layers[record.layer_slot].layer,
                                              ": the checksums of its codes are corrupt"));
  }
  return layer;
}

std::shared_ptr<const Codebook> CacheRecovery::CodebookOf(const LayerRecord& record,
                                                          const LayerShape& shape) {
  const auto known = codebooks_.find(record.codebook.unit);
  if (known != codebooks_.end()) {
    const auto& codebook = known->second;
    const bool same = codebook != nullptr && codebook->extent() == record.codebook &&
                      codebook->header().index == record.index &&
                      codebook->header().kv_head_count == shape.kv_heads &&
                      codebook->header().key_dim == shape.key_dim;
    return same ? codebook : nullptr;
  }
  auto& codebook = codebooks_[record.codebook.unit];
  auto extent = cache_.pool->Claim(record.codebook, Codebook::SizeBytes(record.index, shape));
  if (extent.has_value()) {
    codebook = Codebook::Recover(*std::move(extent), record.index, shape);
  }
  return codebook;
}

std::shared_ptr<const SegmentIndex> CacheRecovery::IndexOf(const SegmentRows& rows,
                                                           const IndexDescriptor& descriptor,
                                                           const LayerNumbers& numbers) {
  const auto key = std::pair(rows.segment_id(), numbers);
  const auto known = indexes_.find(key);
  if (known != indexes_.end() && known->second->index() == descriptor) return known->second;
  std::shared_ptr<const SegmentIndex> index;
  for (uint32_t slot = 0; slot < numbers.size(); ++slot) {
    if (numbers[slot] == EntryRecord::kNoLayer) continue;
    if (!cache_.layers.layers[slot].shape.has_index()) continue;
    auto layer = LayerOf(numbers[slot], {.segment_id = rows.segment_id(),
                                         .index = descriptor,
                                         .layer_slot = slot,
                                         .slot_capacity = rows.slot_capacity(),
                                         .data = {},
                                         .codebook = {}});
    if (layer.data == nullptr) continue;
    if (index == nullptr) {
      index = std::make_shared<const SegmentIndex>(cache_.layers, descriptor);
    }
    index = index->With(slot, std::move(layer));
  }
  if (index != nullptr) indexes_[key] = index;
  return index;
}

void CacheRecovery::RecoverIndexes(Draft& draft) {
  std::vector<IndexDescriptor> kept;
  std::vector<SegmentEntry>& segments = draft.list.segments;
  for (size_t i = 0; i < draft.list.indexes.size(); ++i) {
    const IndexDescriptor& descriptor = draft.list.indexes[i];
    if (!IsUsable(descriptor)) {  // a plug-in's, which alone knows its sizes
      LeaveOut(draft, descriptor);
      draft.is_complete_list = false;
      continue;
    }
    std::vector<std::shared_ptr<const SegmentIndex>> found;
    bool was_complete = true;
    bool is_complete = true;
    for (size_t entry = 0; entry < segments.size(); ++entry) {
      const LayerNumbers& numbers = draft.layer_numbers[entry][i];
      found.push_back(IndexOf(*segments[entry].rows, descriptor, numbers));
      for (uint32_t slot = 0; slot < numbers.size(); ++slot) {
        if (!cache_.layers.layers[slot].shape.has_index()) continue;
        const bool was_ready = numbers[slot] != EntryRecord::kNoLayer;
        const bool is_ready = found.back() != nullptr && found.back()->ready(slot);
        if (was_ready && !is_ready) {
          Drop(draft.identity.sequence_id,
               absl::StrCat("codes of segment ", segments[entry].rows->segment_id(), ", layer ",
                            cache_.layers.layers[slot].layer, " are missing or corrupt"));
          draft.is_complete_list = false;
        }
        was_complete = was_complete && was_ready;
        is_complete = is_complete && is_ready;
      }
    }
    const auto& live = draft.identity.live_index;
    if (!is_complete && !(live.has_value() && live->index == descriptor)) {
      draft.is_complete_list = false;  // no build will complete it
      std::erase(found, nullptr);
      draft.unlisted.insert(draft.unlisted.end(), found.begin(), found.end());
      continue;
    }
    kept.push_back(descriptor);
    for (size_t entry = 0; entry < segments.size(); ++entry) {
      segments[entry].indexes.push_back(found[entry]);
      if (segments[entry].closed || found[entry] == nullptr) continue;
      // The earlier process was killed after it had counted the cells and before it had closed the
      // segment.
      for (uint32_t slot = 0; slot < cache_.layers.size(); ++slot) {
        if (found[entry]->ready(slot)) found[entry]->header(slot).counted_end.store(0);
      }
    }
  }
  draft.list.indexes = std::move(kept);
}

// Pins the shared rows of open segments, so that their writers do not overwrite them.
void CacheRecovery::PinTails(std::vector<Draft>& drafts) {
  for (Draft& draft : drafts) {
    for (SegmentEntry& entry : draft.list.segments) {
      const auto owner = owners_.find(entry.rows.get());
      if (!entry.closed || owner == owners_.end()) continue;
      PinnedActiveSegment pinned = PinActiveSegment(
          std::vector<uint32_t>(cache_.layers.size(), entry.token_end), entry.rows.get());
      entry.use = std::make_shared<SegmentUse>(entry.rows, std::move(pinned.pin));
      drafts[owner->second].views.push_back(std::move(pinned.view));
    }
  }
}

RecoveredSequence CacheRecovery::Build(Draft draft) {
  auto first = CompleteSnapshot(std::move(draft.list), std::move(draft.layer_tokens));
  auto record = std::make_unique<SequenceRecord>(
      SequenceRecord::Existing{.table = cache_.records,
                               .slot = draft.slot,
                               .state = draft.state,
                               .known = draft.is_complete_list ? first->list : nullptr,
                               .unlisted = std::move(draft.unlisted)});
  if (!draft.is_complete_list) {
    // Writes the list before the records of the parts that were left out are emptied. If there is
    // no room for it, the next change of the sequence writes it, and the records stay until then.
    record->Write(first->list, first->layer_tokens, draft.state.suspended != 0).IgnoreError();
  }
  const uint32_t token_count = first->token_count();
  auto sequence =
      std::make_shared<Sequence>(draft.identity.sequence_id, draft.identity.session,
                                 Sequence::Start{.first = std::move(first),
                                                 .record = std::move(record),
                                                 .suspended = draft.state.suspended != 0,
                                                 .views = std::move(draft.views),
                                                 .group_key = draft.identity.group_key,
                                                 .retention = draft.identity.retention});
  sequence->holds().PinUntil(draft.state.pinned_until);
  auto names = std::make_shared<NamedTokens>(cache_.prefixes, draft.identity.root, sequence,
                                             token_count, std::move(draft.names));
  sequence->Watch(names).IgnoreError();  // cannot fail: the sequence is not dropped
  names->Restore(std::move(draft.name_words));
  return {.identity = std::move(draft.identity),
          .sequence = std::move(sequence),
          .names = std::move(names)};
}

}  // namespace

RecoveredCache RecoverSequences(const Cache& cache) { return CacheRecovery(cache).Run(); }

}  // namespace pqcached::kvstore

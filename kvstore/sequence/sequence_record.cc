#include "kvstore/sequence/sequence_record.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/base/crc32c.h"
#include "kernels/base/status_macros.h"
#include "kvstore/records/record_bytes.h"
#include "kvstore/refusal.h"

namespace pqcached::kvstore {
namespace {

absl::Status NotRecorded(absl::string_view what, const absl::Status& why) {
  return ReplaceText(absl::StrCat("no room for the record of ", what, ": ", TextOf(why)), why);
}

// Returns the number of the record of these rows, which is created if there is none.
absl::StatusOr<uint32_t> RowsNumber(RecordTable& table, const SegmentRows& rows)
    ABSL_EXCLUSIVE_LOCKS_REQUIRED(table.mutex()) {
  if (rows.record().valid()) return rows.record().number();
  auto slot = table.Take(RecordKind::kRows);
  if (!slot.ok()) return NotRecorded("another segment", slot.status());
  const uint32_t heads = table.shape().head_count;
  RecordWriter writer(table.rows().Open(slot->number()));
  writer.Add(RowsRecord{.segment_id = rows.segment_id(),
                        .first_position = rows.first_position(),
                        .slot_capacity = rows.slot_capacity(),
                        .head_count = heads});
  for (uint32_t head = 0; head < heads; ++head) writer.Add(rows.extent(head));
  table.rows().Commit(slot->number(), writer.size_bytes());
  table.MarkSegmentIdUsed(rows.segment_id());
  rows.record() = *std::move(slot);
  return rows.record().number();
}

// Same for a layer that is ready.
absl::StatusOr<uint32_t> LayerNumber(RecordTable& table, const SegmentRows& rows,
                                     const SegmentIndex& index, uint32_t layer_slot)
    ABSL_EXCLUSIVE_LOCKS_REQUIRED(table.mutex()) {
  RecordSlot& record = index.layer(layer_slot).data->record();
  if (record.valid()) return record.number();
  auto slot = table.Take(RecordKind::kLayer);
  if (!slot.ok()) return NotRecorded("another layer of an index", slot.status());
  RecordWriter writer(table.layers().Open(slot->number()));
  writer.Add(LayerRecord{.segment_id = rows.segment_id(),
                         .index = index.index(),
                         .layer_slot = layer_slot,
                         .slot_capacity = rows.slot_capacity(),
                         .data = index.extent(layer_slot),
                         .codebook = index.codebook(layer_slot)->extent()});
  table.layers().Commit(slot->number(), writer.size_bytes());
  record = *std::move(slot);
  return record.number();
}

size_t ListBytes(const SegmentList& list, uint32_t layer_count) {
  const size_t entry_bytes =
      sizeof(EntryRecord) + list.indexes.size() * layer_count * sizeof(uint32_t);
  return sizeof(ListRecord) + list.indexes.size() * sizeof(IndexDescriptor) +
         list.segments.size() * entry_bytes;
}

absl::Status EncodeList(RecordTable& table, const SegmentList& list, RecordWriter& writer)
    ABSL_EXCLUSIVE_LOCKS_REQUIRED(table.mutex()) {
  writer.Add(ListRecord{.entry_count = static_cast<uint32_t>(list.segments.size()),
                        .index_count = static_cast<uint32_t>(list.indexes.size()),
                        .prefill_closed = list.prefill_closed});
  writer.AddAll(std::span(list.indexes));
  for (const SegmentEntry& entry : list.segments) {
    ASSIGN_OR_RETURN(const auto rows, RowsNumber(table, *entry.rows));
    writer.Add(EntryRecord{.segment_id = entry.rows->segment_id(),
                           .rows = rows,
                           .token_end = entry.token_end,
                           .closed = entry.closed});
    for (size_t i = 0; i < list.indexes.size(); ++i) {
      const SegmentIndex* index = entry.indexes[i].get();
      for (uint32_t slot = 0; slot < table.shape().layer_count; ++slot) {
        if (index == nullptr || !index->ready(slot)) {
          writer.Add(EntryRecord::kNoLayer);
          continue;
        }
        ASSIGN_OR_RETURN(const auto number, LayerNumber(table, *entry.rows, *index, slot));
        writer.Add(number);
      }
    }
  }
  return absl::OkStatus();
}

void WriteIdentity(RecordTable& table, uint32_t number, const SequenceIdentity& identity) {
  RecordWriter writer(table.identities().Open(number));
  writer.Add(identity.sequence_id);
  writer.AddText(identity.session);
  writer.Add(identity.root);
  writer.Add(uint32_t{identity.live_index.has_value()});
  const LiveIndex live = identity.live_index.value_or(LiveIndex{});
  writer.Add(live.index);
  writer.Add(live.iterations);
  writer.Add(live.seed);
  writer.Add(live.train_tokens);
  writer.Add(live.sink_tokens);
  const bool has_retention = identity.retention != Retention::kByOption;
  if (!identity.group_key.empty() || has_retention) writer.AddText(identity.group_key);
  if (has_retention) writer.Add(static_cast<uint32_t>(identity.retention));
  table.identities().Commit(number, writer.size_bytes());
}

}  // namespace

std::optional<SequenceIdentity> ReadIdentity(std::span<const std::byte> bytes) {
  RecordReader reader(bytes);
  SequenceIdentity identity;
  identity.sequence_id = reader.Get<uint64_t>();
  identity.session = reader.GetText();
  identity.root = reader.Get<PrefixKey>();
  const auto is_live = reader.Get<uint32_t>();
  LiveIndex live;
  live.index = reader.Get<IndexDescriptor>();
  live.iterations = reader.Get<uint32_t>();
  live.seed = reader.Get<uint64_t>();
  live.train_tokens = reader.Get<uint32_t>();
  live.sink_tokens = reader.Get<uint32_t>();
  if (is_live != 0) identity.live_index = live;
  if (reader.ok() && !reader.done()) identity.group_key = reader.GetText();
  if (identity.group_key.size() > kMaxGroupKeyBytes) return std::nullopt;
  if (reader.ok() && !reader.done()) {
    const auto retention = reader.Get<uint32_t>();
    if (retention > static_cast<uint32_t>(Retention::kNever)) return std::nullopt;
    identity.retention = static_cast<Retention>(retention);
  }
  if (!reader.done() || is_live > 1) return std::nullopt;
  return identity;
}

SequenceRecord::SequenceRecord(Existing standing)
    : table_(std::move(standing.table)),
      slot_(std::move(standing.slot)),
      state_(standing.state),
      recorded_list_(std::move(standing.known)),
      unlisted_(std::move(standing.unlisted)) {}

SequenceRecord::~SequenceRecord() {
  const MutexLock lock(&table_->mutex());
  table_->FreeBlock(state_.list);
}

absl::StatusOr<std::unique_ptr<SequenceRecord>> SequenceRecord::Create(
    const std::shared_ptr<RecordTable>& table, const SequenceIdentity& identity,
    const Snapshot& first) {
  if (identity.session.size() > SequenceIdentity::kMaxSessionBytes) {
    return InvalidArgument("session",
                           absl::StrCat(identity.session.size(), " bytes, must be at most ",
                                        SequenceIdentity::kMaxSessionBytes));
  }
  absl::StatusOr<RecordSlot> slot;
  {
    const MutexLock lock(&table->mutex());
    slot = table->Take(RecordKind::kSequence);
  }
  if (!slot.ok()) return NotRecorded("another sequence", slot.status());
  const uint32_t number = slot->number();
  auto record = std::make_unique<SequenceRecord>(
      Existing{.table = table,
               .slot = std::make_shared<const RecordSlot>(*std::move(slot)),
               .state = {.layer_count = table->shape().layer_count},
               .known = nullptr});
  RETURN_IF_ERROR(record->Write(first.list, first.layer_tokens, false));
  if (!table->detached()) WriteIdentity(*table, number, identity);
  return record;
}

absl::Status SequenceRecord::Write(const std::shared_ptr<const SegmentList>& list,
                                   const std::vector<uint32_t>& layer_tokens, bool suspended,
                                   std::optional<int64_t> pinned_until) {
  if (table_->detached()) return absl::OkStatus();
  StateRecord next = state_;
  ++next.generation;
  next.suspended = suspended;
  next.pinned_until = pinned_until.value_or(next.pinned_until);
  const bool same_list = list == recorded_list_;
  if (!same_list) {
    RETURN_IF_ERROR(WriteList(*list, next));
  }
  WriteState(next, layer_tokens);
  if (!same_list) {
    const MutexLock lock(&table_->mutex());
    table_->FreeBlock(state_.list);
  }
  state_ = next;
  if (!same_list) {
    recorded_list_ = list;
    unlisted_.clear();
  }
  return absl::OkStatus();
}

absl::Status SequenceRecord::WriteList(const SegmentList& list, StateRecord& state) {
  state.list = HeapBlock{};
  state.list_bytes = 0;
  state.list_crc = 0;
  if (list.segments.empty()) return absl::OkStatus();
  const size_t size_bytes = ListBytes(list, table_->shape().layer_count);
  const MutexLock lock(&table_->mutex());
  const auto block = table_->AllocateBlock(size_bytes);
  if (!block.ok()) return NotRecorded("another list of segments", block.status());
  RecordWriter writer(table_->bytes(*block));
  if (absl::Status status = EncodeList(*table_, list, writer); !status.ok()) {
    table_->FreeBlock(*block);
    return status;
  }
  state.list = *block;
  state.list_bytes = static_cast<uint32_t>(writer.size_bytes());
  state.list_crc = kernels::Crc32c(table_->exec(), table_->bytes(*block).first(state.list_bytes));
  return absl::OkStatus();
}

void SequenceRecord::WriteState(const StateRecord& state,
                                const std::vector<uint32_t>& layer_tokens) {
  const uint32_t slot = 2 * slot_->number() + static_cast<uint32_t>(state.generation % 2);
  RecordWriter writer(table_->states().Open(slot));
  writer.Add(state);
  writer.AddAll(std::span(layer_tokens));
  table_->states().Commit(slot, writer.size_bytes());
}

void SequenceRecord::Remove() {
  if (!table_->detached()) table_->identities().Clear(slot_->number());
}

}  // namespace pqcached::kvstore

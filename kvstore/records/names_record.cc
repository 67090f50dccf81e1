#include "kvstore/records/names_record.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "kernels/base/crc32c.h"
#include "kvstore/memory/durable_store.h"
#include "kvstore/records/record_bytes.h"

namespace pqcached::kvstore {

NamesRecord::NamesRecord(std::shared_ptr<RecordTable> table, std::shared_ptr<const RecordSlot> slot)
    : table_(std::move(table)), slot_(std::move(slot)) {
  static_assert(sizeof(Names) <= RecordTable::kNamesBytes);
}

NamesRecord::~NamesRecord() {
  const MutexLock lock(&table_->mutex());
  table_->FreeBlock(names_.block);
}

NameWords NamesRecord::Recover(bool& broken) {
  Names newest;
  for (const uint32_t turn : {0u, 1u}) {
    const SlotArray::Content content = table_->names().Read(2 * slot_->number() + turn);
    if (content.state == SlotArray::State::kBroken) broken = true;
    if (content.state != SlotArray::State::kFull) continue;
    RecordReader reader(content.bytes);
    const auto names = reader.Get<Names>();
    if (!reader.done()) broken = true;
    if (names.kind != NameKind::kTokenIds && names.kind != NameKind::kContentKeys) broken = true;
    if (names.generation > newest.generation) newest = names;
  }
  if (broken) return {};  // the broken one may be the newer one
  if (newest.generation == 0) return {};
  names_.generation = newest.generation;
  if (!newest.block.valid() || newest.count == 0) return {};
  if (!table_->ClaimBlock(newest.block)) {
    broken = true;
    return {};
  }
  names_.block = newest.block;  // owned by this object from now on, even if its content is broken
  const auto bytes = table_->bytes(newest.block);
  const size_t size_bytes = size_t{newest.count} * sizeof(uint32_t);
  if (size_bytes > bytes.size() ||
      kernels::Crc32c(table_->exec(), bytes.first(size_bytes)) != newest.crc) {
    broken = true;
    return {};
  }
  NameWords names{.kind = newest.kind, .words = std::vector<uint32_t>(newest.count)};
  std::memcpy(names.words.data(), bytes.data(), size_bytes);
  names_ = newest;
  return names;
}

// Moves the words to a longer block. Returns false if the heap has none.
bool NamesRecord::Grow(std::span<const uint32_t> words, Names& next) {
  absl::StatusOr<HeapBlock> block;
  {
    const MutexLock lock(&table_->mutex());
    block = table_->AllocateBlock(std::max(words.size_bytes(), 2 * next.block.size_bytes()));
    if (!block.ok()) block = table_->AllocateBlock(words.size_bytes());
  }
  if (!block.ok()) return false;
  PQC_CRASH_POINT();
  std::memcpy(table_->bytes(*block).data(), words.data(), size_t{next.count} * sizeof(uint32_t));
  next.block = *block;
  return true;
}

void NamesRecord::Write(NameKind kind, std::span<const uint32_t> words) {
  if (table_->detached()) return;
  Names next = names_;
  ++next.generation;
  next.kind = kind;
  if (words.size() < next.count) {
    next.count = static_cast<uint32_t>(words.size());
    next.crc = kernels::Crc32c(table_->exec(), std::as_bytes(words));
  }
  if (words.size_bytes() > next.block.size_bytes() && !Grow(words, next)) {
    words = words.first(next.block.size_bytes() / sizeof(uint32_t));
  }
  if (words.size() > next.count) {
    const auto added = std::as_bytes(words.subspan(next.count));
    PQC_CRASH_POINT();
    std::memcpy(table_->bytes(next.block).data() + size_t{next.count} * sizeof(uint32_t),
                added.data(), added.size());
    next.crc = kernels::Crc32c(table_->exec(), added, next.crc);
    next.count = static_cast<uint32_t>(words.size());
  }
  const uint32_t slot = 2 * slot_->number() + static_cast<uint32_t>(next.generation % 2);
  RecordWriter writer(table_->names().Open(slot));
  writer.Add(next);
  table_->names().Commit(slot, writer.size_bytes());
  if (next.block.unit != names_.block.unit || next.block.order != names_.block.order) {
    const MutexLock lock(&table_->mutex());
    table_->FreeBlock(names_.block);
  }
  names_ = next;
}

}  // namespace pqcached::kvstore

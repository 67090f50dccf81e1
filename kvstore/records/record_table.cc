#include "kvstore/records/record_table.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <new>

#include "absl/strings/str_cat.h"
#include "kernels/base/check.h"
#include "kernels/base/status_macros.h"
#include "kvstore/memory/durable_store.h"
#include "kvstore/refusal.h"

namespace pqcached::kvstore {
namespace {

constexpr uint64_t kTableMagic = 0x3252'4c42'5443'5051;  // RootRecords checks the version
constexpr size_t kTableHeaderBytes = 4096;

// Pages of the table are allocated in steps of this size.
constexpr size_t kTableChunkBytes = size_t{256} << 10;

absl::Status FullError() { return ResourceExhausted("", "the record table is full", kRetryMemory); }

size_t PageUp(size_t bytes) { return (bytes + 4095) / 4096 * 4096; }

}  // namespace

struct RecordTable::Header {
  std::atomic<uint64_t> magic;
  DurableCounter ends[3];  // per RecordKind
  DurableCounter next_segment_id;
};

// Offsets of the table's parts. Each SegmentRows uses at least one unit per head, each layer of an
// index at least one unit; this bounds the number of slots.
struct RecordTable::TableLayout {
  struct Array {
    size_t offset = 0;
    size_t slot_bytes = 0;
    size_t count = 0;
    size_t size_bytes() const { return slot_bytes * count; }
  };
  size_t in_use = kTableHeaderBytes;
  Array rows, row_checksums, layers, layer_checksums, identities, states, names;
  size_t heap = 0;
  size_t size_bytes = 0;

  explicit TableLayout(const Shape& shape) {
    size_t next = PageUp(in_use + shape.unit_count);
    const size_t heads = std::max<size_t>(1, shape.head_count);
    const size_t rows_count = shape.unit_count / heads + 1;
    const size_t sequences = shape.sequence_slots;
    const auto place = [&next](Array& array, size_t content_bytes, size_t count) {
      array = {next, SlotArray::SlotBytes(content_bytes), count};
      next = PageUp(next + array.size_bytes());
    };
    place(rows, kRowsHeadBytes + heads * sizeof(ExtentRef), rows_count);
    place(row_checksums, kRowsHeadBytes + heads * sizeof(uint32_t), rows_count);
    place(layers, kLayerBytes, size_t{shape.unit_count} + 1);
    place(layer_checksums, kLayerBytes, size_t{shape.unit_count} + 1);
    place(identities, kIdentityBytes, sequences);
    place(states, kStateHeadBytes + shape.layer_count * sizeof(uint32_t), 2 * sequences);
    place(names, kNamesBytes, 2 * sequences);
    heap = next;
    size_bytes = PageUp(heap + shape.heap_bytes);
  }
};

RecordSlot::~RecordSlot() {
  if (table_ != nullptr) table_->Give(kind_, number_);
}

absl::StatusOr<std::shared_ptr<RecordTable>> RecordTable::Create(
    const kernels::Exec& exec, DescriptorKeeper& keeper, const std::string& name,
    const Shape& shape, std::shared_ptr<MemoryPromise> promise) {
  const TableLayout places(shape);
  const size_t size_bytes = places.size_bytes;
  ASSIGN_OR_RETURN(auto memory, keeper.CreateMemory(name.c_str(), size_bytes));
  ASSIGN_OR_RETURN(auto mapping, Mapping::Map(memory, size_bytes, Mapping::Access::kReadWrite));
  std::shared_ptr<RecordTable> table(
      new RecordTable(exec, shape, std::move(memory), std::move(mapping), std::move(promise)));
  // The areas that are written without a number; those of numbers follow with Take.
  RETURN_IF_ERROR(table->granted_.Ensure(0, places.rows.offset));
  auto* header = new (table->memory_.data()) Header{};
  for (DurableCounter& end : header->ends) end.Reset(0);
  header->next_segment_id.Reset(1);
  StoreInOrder(header->magic, kTableMagic);
  return table;
}

absl::StatusOr<std::shared_ptr<RecordTable>> RecordTable::Open(
    const kernels::Exec& exec, const FileDescriptor& kept, const Shape& shape,
    std::shared_ptr<MemoryPromise> promise) {
  const size_t size_bytes = TableLayout(shape).size_bytes;
  if (SizeOf(kept) < size_bytes) {
    return DataLoss("the record table is missing or too short");
  }
  ASSIGN_OR_RETURN(auto copy, Duplicate(kept.get()));
  ASSIGN_OR_RETURN(auto mapping, Mapping::Map(kept, size_bytes, Mapping::Access::kReadWrite));
  const auto& header = *reinterpret_cast<const Header*>(mapping.data());
  if (header.magic.load(std::memory_order_acquire) != kTableMagic) {
    return DataLoss("the record table has another layout");
  }
  std::shared_ptr<RecordTable> table(
      new RecordTable(exec, shape, std::move(copy), std::move(mapping), std::move(promise)));
  const MutexLock lock(&table->mutex_);
  for (const RecordKind kind : {RecordKind::kRows, RecordKind::kLayer, RecordKind::kSequence}) {
    const uint32_t end = table->end(kind);
    table->numbers(kind).StartWithTaken(end);
    table->claimed_[static_cast<size_t>(kind)].resize(end);
    table->end_of(kind).Reset(end);  // repairs it if it was corrupt
  }
  table->header().next_segment_id.Reset(table->next_segment_id());
  return table;
}

RecordTable::RecordTable(const kernels::Exec& exec, const Shape& shape, FileDescriptor descriptor,
                         Mapping memory, std::shared_ptr<MemoryPromise> promise)
    : exec_(exec),
      shape_(shape),
      memory_descriptor_(std::move(descriptor)),
      memory_(std::move(memory)),
      granted_(memory_descriptor_.get(), {memory_.data(), memory_.size_bytes()}, kTableChunkBytes,
               std::move(promise)),
      heap_blocks_(static_cast<uint32_t>(shape.heap_bytes / HeapBlock::kUnitBytes)) {
  const TableLayout places(shape);
  uint32_t kind = 1;
  const auto array = [&](const TableLayout::Array& at) {
    return SlotArray(exec_, {memory_.data() + at.offset, at.size_bytes()}, at.slot_bytes, kind++);
  };
  in_use_ = memory_.data() + places.in_use;
  heap_ = memory_.data() + places.heap;
  rows_ = array(places.rows);
  row_sums_ = array(places.row_checksums);
  layers_ = array(places.layers);
  layer_sums_ = array(places.layer_checksums);
  identities_ = array(places.identities);
  states_ = array(places.states);
  names_ = array(places.names);
  numbers_[0] = SlotNumbers(rows_.count());
  numbers_[1] = SlotNumbers(layers_.count());
  numbers_[2] = SlotNumbers(identities_.count());
}

void RecordTable::Mark(UnitRange units, uint8_t used) {
  if (detached()) return;
  FillUnordered({in_use_ + units.begin, units.count}, used);
  DurableFence();  // stored before the writes that follow
}

bool RecordTable::is_used(uint32_t unit) const { return in_use_[unit] != std::byte{0}; }

DurableCounter& RecordTable::end_of(RecordKind kind) const {
  return header().ends[static_cast<size_t>(kind)];
}

uint32_t RecordTable::end(RecordKind kind) const {
  const SlotArray& slots = kind == RecordKind::kRows    ? rows_
                           : kind == RecordKind::kLayer ? layers_
                                                        : identities_;
  const uint64_t written = end_of(kind).Read().value_or(slots.count());
  return static_cast<uint32_t>(std::min<uint64_t>(written, slots.count()));
}

absl::StatusOr<RecordSlot> RecordTable::Take(RecordKind kind) {
  const auto number = numbers(kind).Take();
  if (!number.has_value()) return FullError();
  if (absl::Status status = MakePresent(kind, *number); !status.ok()) {
    numbers(kind).Give(*number);
    return status;
  }
  if (!detached()) end_of(kind).RaiseTo(numbers(kind).end());
  return RecordSlot(shared_from_this(), kind, *number);
}

absl::Status RecordTable::MakePresent(std::span<const std::byte> bytes) {
  return granted_.Ensure(static_cast<size_t>(bytes.data() - memory_.data()), bytes.size());
}

absl::Status RecordTable::MakePresent(RecordKind kind, uint32_t number) {
  switch (kind) {
    case RecordKind::kRows:
      RETURN_IF_ERROR(MakePresent(rows_.slot(number)));
      return MakePresent(row_sums_.slot(number));
    case RecordKind::kLayer:
      RETURN_IF_ERROR(MakePresent(layers_.slot(number)));
      return MakePresent(layer_sums_.slot(number));
    case RecordKind::kSequence:
      break;
  }
  RETURN_IF_ERROR(MakePresent(identities_.slot(number)));
  for (const uint32_t turn : {0u, 1u}) {
    RETURN_IF_ERROR(MakePresent(states_.slot(2 * number + turn)));
    RETURN_IF_ERROR(MakePresent(names_.slot(2 * number + turn)));
  }
  return absl::OkStatus();
}

void RecordTable::Empty(RecordKind kind, uint32_t number) {
  switch (kind) {
    case RecordKind::kRows:
      rows_.Clear(number);
      row_sums_.Clear(number);
      break;
    case RecordKind::kLayer:
      layers_.Clear(number);
      layer_sums_.Clear(number);
      break;
    case RecordKind::kSequence:
      identities_.Clear(number);
      for (const uint32_t turn : {0u, 1u}) {
        states_.Clear(2 * number + turn);
        names_.Clear(2 * number + turn);
      }
      break;
  }
}

void RecordTable::Give(RecordKind kind, uint32_t number) {
  const MutexLock lock(&mutex_);
  if (detached()) return;
  Empty(kind, number);
  numbers(kind).Give(number);
}

absl::StatusOr<HeapBlock> RecordTable::AllocateBlock(size_t size_bytes) {
  const size_t units =
      std::max<size_t>(1, (size_bytes + HeapBlock::kUnitBytes - 1) / HeapBlock::kUnitBytes);
  HeapBlock block{.unit = 0, .order = static_cast<uint32_t>(std::bit_width(units - 1))};
  const auto unit = heap_blocks_.Allocate(block.order);
  if (!unit.has_value()) return FullError();
  block.unit = *unit;
  absl::Status status = MakePresent(bytes(block));
  if (status.ok()) return block;
  heap_blocks_.Free(block.unit, block.order);
  return status;
}

void RecordTable::FreeBlock(HeapBlock block) {
  if (block.valid() && !detached()) heap_blocks_.Free(block.unit, block.order);
}

std::span<std::byte> RecordTable::bytes(HeapBlock block) const {
  return {heap_ + size_t{block.unit} * HeapBlock::kUnitBytes, block.size_bytes()};
}

void RecordTable::MarkSegmentIdUsed(uint64_t segment_id) {
  if (!detached()) header().next_segment_id.RaiseTo(segment_id + 1);
}

uint64_t RecordTable::next_segment_id() const {
  return std::max<uint64_t>(1, header().next_segment_id.Read().value_or(kAfterAllIds));
}

std::optional<RecordSlot> RecordTable::Claim(RecordKind kind, uint32_t number) {
  const MutexLock lock(&mutex_);
  std::vector<bool>& claimed = claimed_[static_cast<size_t>(kind)];
  if (number >= claimed.size() || claimed[number]) return std::nullopt;
  claimed[number] = true;
  return RecordSlot(shared_from_this(), kind, number);
}

bool RecordTable::ClaimBlock(HeapBlock block) {
  const MutexLock lock(&mutex_);
  return heap_blocks_.Claim(block.unit, block.order);
}

uint32_t RecordTable::EndRecovery() {
  const MutexLock lock(&mutex_);
  uint32_t emptied = 0;
  for (const RecordKind kind : {RecordKind::kRows, RecordKind::kLayer, RecordKind::kSequence}) {
    std::vector<bool>& claimed = claimed_[static_cast<size_t>(kind)];
    const SlotArray& slots = kind == RecordKind::kRows    ? rows_
                             : kind == RecordKind::kLayer ? layers_
                                                          : identities_;
    for (uint32_t number = 0; number < claimed.size(); ++number) {
      if (claimed[number]) continue;
      if (slots.Read(number).state != SlotArray::State::kEmpty) ++emptied;
      Empty(kind, number);
      numbers(kind).Give(number);
    }
    claimed.clear();
  }
  return emptied;
}

}  // namespace pqcached::kvstore

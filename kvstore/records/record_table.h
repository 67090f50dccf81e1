// RecordTable: the memory in which one cache records what its pool holds (memory/keeper.h).
//
// Its parts, in this order:
//   in-use map   a byte per unit of the pool: set before an extent is allocated, cleared when it is
//                freed
//   rows         a slot per SegmentRows (slot_array.h), and one for its checksums
//   layers       a slot per layer of a SegmentIndex, and one for its checksums
//   sequences    per sequence its identity, and two slots each for its state and its names, which
//                are written alternately
//   heap         blocks for data of variable size: lists of segments, token ids
// sequence/sequence_record.h defines the content of the slots, store/recovery.h reads it again.
//
// A slot is identified by a number. The owner of the number (RecordSlot) empties the slot when it
// is destroyed, unless the table is detached: then everything stays for the next process.
//
// Thread-safe, except for the functions that require `mutex`.
#ifndef PQCACHED_KVSTORE_RECORDS_RECORD_TABLE_H_
#define PQCACHED_KVSTORE_RECORDS_RECORD_TABLE_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "kvstore/limits/granted_memory.h"
#include "kvstore/limits/memory_ledger.h"
#include "kvstore/memory/buddy.h"
#include "kvstore/memory/extent_ledger.h"
#include "kvstore/memory/keeper.h"
#include "kvstore/memory/memfd.h"
#include "kvstore/mutex.h"
#include "kvstore/read/layout.h"
#include "kvstore/records/slot_array.h"

namespace pqcached::kvstore {

class RecordTable;

// Version of the structs that are stored in the records: those of sequence/sequence_record.h and
// names_record.h, the specs of caches (cache_image.h), the areas of a table, and the units that an
// extent has. A change of any of them raises it (tests/kvstore/read/layout_version_test.cc has rows
// of the structs).
inline constexpr uint32_t kRecordVersion = 4;  // before, an extent was a whole, aligned block

enum class RecordKind : uint8_t { kRows, kLayer, kSequence };

// Owner of a slot number of a table. Movable.
class RecordSlot {
 public:
  RecordSlot() = default;
  RecordSlot(std::shared_ptr<RecordTable> table, RecordKind kind, uint32_t number)
      : table_(std::move(table)), kind_(kind), number_(number) {}
  RecordSlot(RecordSlot&& other) noexcept
      : table_(std::move(other.table_)), kind_(other.kind_), number_(other.number_) {}
  RecordSlot& operator=(RecordSlot&& other) noexcept {
    std::swap(table_, other.table_);
    std::swap(kind_, other.kind_);
    std::swap(number_, other.number_);
    return *this;
  }
  ~RecordSlot();

  bool valid() const { return table_ != nullptr; }
  uint32_t number() const { return number_; }

 private:
  std::shared_ptr<RecordTable> table_;
  RecordKind kind_ = RecordKind::kRows;
  uint32_t number_ = 0;
};

// A block of the heap. order == kNone: no block.
struct HeapBlock {
  static constexpr uint32_t kNone = ~0u;
  static constexpr size_t kUnitBytes = 256;
  uint32_t unit = 0;
  uint32_t order = kNone;

  bool valid() const { return order != kNone; }
  size_t size_bytes() const { return valid() ? kUnitBytes << order : 0; }
};

class RecordTable final : public ExtentLedger, public std::enable_shared_from_this<RecordTable> {
 public:
  struct Shape {
    uint32_t unit_count = 0;   // of the pool
    uint32_t head_count = 0;   // over all layers
    uint32_t layer_count = 0;  // stored layers
    uint32_t sequence_slots = 0;
    uint64_t heap_bytes = 0;
  };
  // Largest content of a slot.
  static constexpr size_t kIdentityBytes = 480;
  static constexpr size_t kNamesBytes = 32;
  static constexpr size_t kLayerBytes = 64;
  static constexpr size_t kStateHeadBytes = 40;  // then uint32_t per layer
  static constexpr size_t kRowsHeadBytes = 24;   // then an ExtentRef per head

  // Creates the memory; the caller stores it in the keeper. `promise`: allocates its pages; null:
  // they are allocated without a ledger. Errors: those of the keeper and of the ledger.
  static absl::StatusOr<std::shared_ptr<RecordTable>> Create(
      const kernels::Exec& exec, DescriptorKeeper& keeper, const std::string& name,
      const Shape& shape, std::shared_ptr<MemoryPromise> promise = nullptr);
  // Maps the table of an earlier process. Until Claim and EndRecovery, all slots count as taken and
  // the heap as free. Errors: kDataLoss if it is not a table of this shape; kResourceExhausted.
  static absl::StatusOr<std::shared_ptr<RecordTable>> Open(
      const kernels::Exec& exec, const FileDescriptor& kept, const Shape& shape,
      std::shared_ptr<MemoryPromise> promise = nullptr);

  const Shape& shape() const { return shape_; }
  const kernels::Exec& exec() const { return exec_; }
  int descriptor() const { return memory_descriptor_.get(); }

  // Record the state of the pool's units; called under the pool's lock.
  void MarkUsed(UnitRange units) override { Mark(units, 1); }
  void MarkFree(UnitRange units) override { Mark(units, 0); }
  bool is_used(uint32_t unit) const override;

  // Stops all writes: the current content stays for the next process.
  void Detach() { detached_.store(true, std::memory_order_release); }
  bool detached() const override { return detached_.load(std::memory_order_acquire); }

  // Protects slot numbers and blocks while they are taken and returned, and records shared by
  // sequences while they are written.
  Mutex& mutex() ABSL_LOCK_RETURNED(mutex_) { return mutex_; }

  // Errors: kResourceExhausted  no number or block is free, or the machine has no pages for it
  absl::StatusOr<RecordSlot> Take(RecordKind kind) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::StatusOr<HeapBlock> AllocateBlock(size_t size_bytes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void FreeBlock(HeapBlock block) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::span<std::byte> bytes(HeapBlock block) const;
  // Marks `segment_id` as used, so that a restarted worker allocates larger ids.
  void MarkSegmentIdUsed(uint64_t segment_id) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  uint64_t next_segment_id() const;

  // The arrays of slots. Only the owner of a number writes its slots.
  SlotArray& rows() { return rows_; }
  SlotArray& row_checksums() { return row_sums_; }
  SlotArray& layers() { return layers_; }
  SlotArray& layer_checksums() { return layer_sums_; }
  SlotArray& identities() { return identities_; }
  SlotArray& states() { return states_; }  // [sequence][2]
  SlotArray& names() { return names_; }    // [sequence][2]

  // Recovery: returns the first number that was never used.
  uint32_t end(RecordKind kind) const;
  // Take over a number or block that is in use. Return nothing (false) if it is already claimed, or
  // if a block is out of range or overlaps another one.
  std::optional<RecordSlot> Claim(RecordKind kind, uint32_t number);
  bool ClaimBlock(HeapBlock block);
  // Empties all slots that were not claimed. Returns how many of them were not empty.
  uint32_t EndRecovery();

 private:
  friend class RecordSlot;
  struct Header;
  struct TableLayout;

  RecordTable(const kernels::Exec& exec, const Shape& shape, FileDescriptor descriptor,
              Mapping memory, std::shared_ptr<MemoryPromise> promise);
  Header& header() const { return *reinterpret_cast<Header*>(memory_.data()); }
  DurableCounter& end_of(RecordKind kind) const;
  SlotNumbers& numbers(RecordKind kind) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return numbers_[static_cast<size_t>(kind)];
  }
  void Mark(UnitRange units, uint8_t used);
  // Allocates the pages of all slots of a number.
  absl::Status MakePresent(RecordKind kind, uint32_t number);
  absl::Status MakePresent(std::span<const std::byte> bytes);
  void Empty(RecordKind kind, uint32_t number);
  void Give(RecordKind kind, uint32_t number);

  const kernels::Exec exec_;
  const Shape shape_;
  const FileDescriptor memory_descriptor_;
  const Mapping memory_;
  GrantedMemory granted_;
  std::byte* in_use_ = nullptr;
  std::byte* heap_ = nullptr;
  SlotArray rows_, row_sums_, layers_, layer_sums_, identities_, states_, names_;
  std::atomic<bool> detached_ = false;

  mutable Mutex mutex_;
  SlotNumbers numbers_[3] ABSL_GUARDED_BY(mutex_);
  BuddyAllocator heap_blocks_ ABSL_GUARDED_BY(mutex_);
  std::vector<bool> claimed_[3] ABSL_GUARDED_BY(mutex_);  // until EndRecovery
};

}  // namespace pqcached::kvstore

#endif  // PQCACHED_KVSTORE_RECORDS_RECORD_TABLE_H_

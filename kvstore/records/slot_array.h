// SlotArray: records in memory that outlives the process; each is either complete or absent.
//
// A *slot* is empty, or holds bytes with their CRC32C. The commit word is stored last, and cleared
// before the bytes change: a process that is killed in between leaves the slot empty. Executed
// stores survive a kill in program order; there is no guarantee for a power failure.
//
// Thread-compatible per slot: different slots may be written concurrently.
#ifndef PQCACHED_KVSTORE_RECORDS_SLOT_ARRAY_H_
#define PQCACHED_KVSTORE_RECORDS_SLOT_ARRAY_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "kernels/base/exec.h"

namespace pqcached::kvstore {

class SlotArray {
 public:
  // kBroken: corrupt, neither empty nor full.
  enum class State : uint8_t { kEmpty, kFull, kBroken };
  struct Content {
    State state = State::kEmpty;
    std::span<const std::byte> bytes;  // when full
  };

  // Returns the bytes that a slot with this capacity for content takes.
  static size_t SlotBytes(size_t content_bytes);

  SlotArray() = default;
  // `memory`: aligned to 8 bytes; holds as many slots as fit completely. If it is all zero, all
  // slots are empty. `kind` distinguishes arrays: content that was written under another kind or
  // slot number reads as broken.
  SlotArray(const kernels::Exec& exec, std::span<std::byte> memory, size_t slot_bytes,
            uint32_t kind);

  uint32_t count() const { return count_; }
  size_t content_bytes() const;  // maximum per slot
  // Returns all bytes of a slot, its head included.
  std::span<const std::byte> slot(uint32_t number) const {
    return {begin_ + size_t{number} * slot_bytes_, slot_bytes_};
  }

  // Empties the slot and returns its bytes for writing; Commit then makes them its content.
  std::span<std::byte> Open(uint32_t slot);
  void Commit(uint32_t slot, size_t size_bytes);
  // REQUIRES: content.size() <= content_bytes().
  // Replaces the content of the slot.
  void Put(uint32_t slot, std::span<const std::byte> content);
  void Clear(uint32_t slot);

  Content Read(uint32_t slot) const;

 private:
  struct Head;
  Head& HeadOf(uint32_t slot) const;
  uint64_t CommitWord(uint32_t slot, size_t size_bytes) const;

  kernels::Exec exec_;
  std::byte* begin_ = nullptr;
  size_t slot_bytes_ = 0;
  uint32_t count_ = 0;
  uint32_t kind_ = 0;
};

// Allocator of slot numbers: returned numbers are taken again first, then those never used.
//
// Thread-compatible.
class SlotNumbers {
 public:
  explicit SlotNumbers(uint32_t count = 0) : count_(count) {}

  std::optional<uint32_t> Take();
  void Give(uint32_t slot) { free_.push_back(slot); }
  // Returns the first number that was never taken.
  uint32_t end() const { return end_; }
  // Starts with slots [0, end) taken; Give then frees the unused ones.
  void StartWithTaken(uint32_t end) { end_ = end; }

 private:
  uint32_t count_;
  uint32_t end_ = 0;
  std::vector<uint32_t> free_;
};

// A number in shared memory that only grows. It is stored twice, so that corruption is detected.
struct DurableCounter {
  std::atomic<uint64_t> value;
  std::atomic<uint64_t> inverse;

  // Sets the number unconditionally, in fresh memory or to repair a corrupt counter.
  void Reset(uint64_t number);
  // Raises the number; no effect if it is already as high. One caller at a time.
  void RaiseTo(uint64_t number);
  // Returns the number, or nothing if it is corrupt.
  std::optional<uint64_t> Read() const;
  // Likewise, of a number that never grows.
  std::optional<uint64_t> ReadExact() const;
};

// Larger than every id that an earlier process can have allocated; used if its counter is corrupt.
inline constexpr uint64_t kAfterAllIds = uint64_t{1} << 40;

}  // namespace pqcached::kvstore

#endif  // PQCACHED_KVSTORE_RECORDS_SLOT_ARRAY_H_

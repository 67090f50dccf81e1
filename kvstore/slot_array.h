// SlotArray: records in memory that outlives the process, each one there as a whole or not at all.
//
// A *slot* is empty, or holds bytes with their CRC32C. The word that says so is stored last, and cleared
// before the bytes change: a process that is killed in between leaves the slot empty. Stores that were
// executed survive a kill in program order; nothing is promised for a loss of power.
//
// Thread-compatible per slot: different slots may be written at once.
#ifndef PQCACHED_KVSTORE_SLOT_ARRAY_H_
#define PQCACHED_KVSTORE_SLOT_ARRAY_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "kernels/exec.h"

namespace pqcached::kvstore {

class SlotArray {
 public:
  enum class State : uint8_t { kEmpty, kFull, kBroken };  // broken: neither, so it has rotted
  struct Content {
    State state = State::kEmpty;
    std::span<const std::byte> bytes;  // when full
  };

  // Bytes of a slot for so much content, and of so many slots.
  static size_t SlotBytes(size_t content_bytes);

  SlotArray() = default;
  // `memory`: aligned to 8 bytes, as many whole slots as fit. All zero: all slots are empty.
  // `kind` tells arrays apart: what was written under another kind or number is broken.
  SlotArray(const kernels::Exec& exec, std::span<std::byte> memory, size_t slot_bytes,
            uint32_t kind);

  uint32_t count() const { return count_; }
  size_t content_bytes() const;  // at most, per slot

  // Empties the slot and gives its bytes to be written, which Commit then makes its content.
  std::span<std::byte> Open(uint32_t slot);
  void Commit(uint32_t slot, size_t size_bytes);
  // REQUIRES: content.size() <= content_bytes().
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

// Which slots are free: the ones that were given back, then those never used.
//
// Thread-compatible.
class SlotNumbers {
 public:
  explicit SlotNumbers(uint32_t count = 0) : count_(count) {}

  std::optional<uint32_t> Take();
  void Give(uint32_t slot) { free_.push_back(slot); }
  // Slots at or behind it were never taken.
  uint32_t end() const { return end_; }
  // Begins with slots [0, end) taken, for Give to free those that are not.
  void BeginWith(uint32_t end) { end_ = end; }

 private:
  uint32_t count_;
  uint32_t end_ = 0;
  std::vector<uint32_t> free_;
};

// A number in shared memory that only grows, held twice, so that it is known when it has rotted.
struct DurableCounter {
  std::atomic<uint64_t> value;
  std::atomic<uint64_t> inverse;

  // Of fresh memory.
  void Reset(uint64_t number);
  // No effect when it is that high already. One caller at a time.
  void RaiseTo(uint64_t number);
  // Nothing when it has rotted.
  std::optional<uint64_t> Read() const;
  // Likewise, of a number that never grows.
  std::optional<uint64_t> ReadExact() const;
};

}  // namespace pqcached::kvstore

#endif  // PQCACHED_KVSTORE_SLOT_ARRAY_H_

// CheckedBytes: bytes that an earlier process left, with their CRC32C. They are verified once,
// before their first use.
//
// Thread-safe.
#ifndef PQCACHED_KVSTORE_MEMORY_CHECKED_BYTES_H_
#define PQCACHED_KVSTORE_MEMORY_CHECKED_BYTES_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "kernels/base/crc32c.h"

namespace pqcached::kvstore {

class CheckedBytes {
 public:
  struct Piece {
    std::span<const std::byte> bytes;
    uint32_t crc = 0;
  };

  explicit CheckedBytes(std::vector<Piece> pieces) : pieces_(std::move(pieces)) {}

  // Returns true when all bytes match their checksums. Increments `losses` when a mismatch is found
  // for the first time.
  bool Verify(const kernels::Exec& exec, std::atomic<uint64_t>& losses) const {
    State state = state_.load(std::memory_order_acquire);
    if (state != State::kUnknown) return state == State::kGood;
    State found = State::kGood;
    for (const Piece& piece : pieces_) {
      if (kernels::Crc32c(exec, piece.bytes) != piece.crc) found = State::kBad;
    }
    if (!state_.compare_exchange_strong(state, found)) return state == State::kGood;
    if (found == State::kBad) losses.fetch_add(1);
    return found == State::kGood;
  }

 private:
  enum class State : uint8_t { kUnknown, kGood, kBad };

  const std::vector<Piece> pieces_;
  mutable std::atomic<State> state_ = State::kUnknown;
};

}  // namespace pqcached::kvstore

#endif  // PQCACHED_KVSTORE_MEMORY_CHECKED_BYTES_H_

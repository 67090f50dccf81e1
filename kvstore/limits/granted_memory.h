// GrantedMemory: a mapping of shared memory whose pages are allocated before they are used, in
// chunks. A store into a page that the kernel cannot provide would be a SIGBUS.
//
// Thread-safe. Ensure takes no lock for chunks that are present.
#ifndef PQCACHED_KVSTORE_LIMITS_GRANTED_MEMORY_H_
#define PQCACHED_KVSTORE_LIMITS_GRANTED_MEMORY_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "kvstore/limits/memory_ledger.h"
#include "kvstore/mutex.h"

namespace pqcached::kvstore {

class GrantedMemory {
 public:
  // `memory`: a writable mapping of the descriptor's memory, from its first byte on; both outlive
  // this object. `promise`: of these bytes; null: pages are allocated without a ledger, and the
  // descriptor is only used by absent_bytes.
  GrantedMemory(int descriptor, std::span<std::byte> memory, size_t chunk_bytes,
                std::shared_ptr<MemoryPromise> promise);

  // Allocates the pages of [begin, begin + size_bytes) that are missing. Their bytes are zero, and
  // other bytes stay, even while others read and write them.
  //
  // Errors: those of MemoryPromise::Allocate
  absl::Status Ensure(size_t begin, size_t size_bytes);
  // Runs `remove`, which may remove pages of the range, while no pages are allocated; Ensure
  // allocates them again.
  void Remove(size_t begin, size_t size_bytes, absl::FunctionRef<void()> remove);

  // Returns the number of bytes in chunks that are present for certain.
  size_t present_bytes() const;
  // Returns true when all chunks that were allocated here have got huge pages.
  bool huge() const { return huge_.load(std::memory_order_relaxed); }
  // Returns the number of bytes that no physical page backs.
  size_t absent_bytes() const;

 private:
  bool IsPresent(size_t first, size_t end) const;
  // Allocates chunks [first, end). REQUIRES: mutex_ is held.
  bool Populate(size_t first, size_t end);
  size_t EndOf(size_t chunk) const;

  const int descriptor_;
  const std::span<std::byte> memory_;
  const size_t chunk_bytes_;
  const std::shared_ptr<MemoryPromise> promise_;  // shared with the owner's other memory
  std::vector<std::atomic<uint8_t>> present_;     // by chunk
  std::atomic<bool> huge_ = true;
  Mutex mutex_;  // held while pages are allocated or removed
};

}  // namespace pqcached::kvstore

#endif  // PQCACHED_KVSTORE_LIMITS_GRANTED_MEMORY_H_

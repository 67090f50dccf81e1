// StagingRing: shared memory through which one client passes rows and pages without copying them
// into messages, and gets pages.
//
// A memfd of slot_count x slot_bytes that the client and this process map. Its size is sealed, so a
// client cannot remove memory during an access; a hole that it punches reads as zeros. A claim
// keeps the memory alive. The memory is never reused for another session.
//
// Thread-safe.
#ifndef PQCACHED_KVSTORE_SHARE_STAGING_H_
#define PQCACHED_KVSTORE_SHARE_STAGING_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "kvstore/limits/memory_ledger.h"
#include "kvstore/memory/memfd.h"
#include "kvstore/mutex.h"
#include "kvstore/share/control_memory.h"

namespace pqcached::kvstore {

inline constexpr size_t kStagingSlotMultiple = size_t{1} << 20;

class StagingRing : public std::enable_shared_from_this<StagingRing> {
 public:
  // Allocates all of the ring's memory. `control` notifies the client when claims end; null: no
  // notification. `ledger`: promises the memory to `tenant`; null: it is allocated without one.
  //
  // Errors: kInvalidArgument    slot_bytes, slot_count
  //         kResourceExhausted  slot_bytes: more than `max_bytes`, or those of the ledger
  static absl::StatusOr<std::shared_ptr<StagingRing>> Create(
      uint64_t slot_bytes, uint32_t slot_count, size_t max_bytes,
      std::shared_ptr<const ControlMemory> control = nullptr, MemoryLedger* ledger = nullptr,
      std::string_view tenant = {});
  ~StagingRing();

  // Returns a descriptor for the client, which can write but not resize or seal.
  absl::StatusOr<SharedMemory> Share() const;

  // Makes the destructor free the memory, although the client may still hold a descriptor of it. To
  // be called when the session ends, but not when only the worker ends: a client that resumes its
  // session sends rows again that are in its ring.
  void FreeAtEnd() { free_at_end_.store(true, std::memory_order_relaxed); }

  // Claims a slot. Errors: see Store::ClaimStaging.
  absl::StatusOr<StagedBytes> Claim(const StagingReference& reference);

  size_t size_bytes() const { return mapping_.size_bytes(); }

 private:
  struct Slot {
    uint64_t next_generation = 0;
    bool claimed = false;
  };

  StagingRing(FileDescriptor memfd, Mapping mapping, std::shared_ptr<MemoryPromise> promise,
              uint64_t slot_bytes, uint32_t slot_count,
              std::shared_ptr<const ControlMemory> control)
      : memfd_(std::move(memfd)),
        mapping_(std::move(mapping)),
        promise_(std::move(promise)),
        slot_bytes_(slot_bytes),
        control_(std::move(control)),
        slots_(slot_count) {}
  absl::Status MarkClaimed(const StagingReference& reference);
  void Release(uint32_t slot);

  const FileDescriptor memfd_;
  const Mapping mapping_;
  const std::shared_ptr<MemoryPromise> promise_;  // null without a ledger
  const uint64_t slot_bytes_;
  const std::shared_ptr<const ControlMemory> control_;
  std::atomic<bool> free_at_end_ = false;
  mutable Mutex mutex_;
  std::vector<Slot> slots_ ABSL_GUARDED_BY(mutex_);
};

// Records the memory of a ring of an earlier process, which is freed when the returned object ends.
std::shared_ptr<const void> AdoptStagingRing(MemoryLedger& ledger, std::string_view tenant,
                                             FileDescriptor ring);

}  // namespace pqcached::kvstore

#endif  // PQCACHED_KVSTORE_SHARE_STAGING_H_

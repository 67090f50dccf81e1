// Staging is the ring of slots through which rows pass on their way to the sidecar.
//
// The client fills a slot, names it in a call, and reuses it when the sidecar is done with it:
// after the answer to the call, or when the control memory says so. When all slots are in flight,
// Take waits, which is the back-pressure. A slot whose call got no answer is abandoned until the
// control memory says that the sidecar is done with it, because a reader might otherwise see it
// change. A slot that a device may still write to is lost.
//
// A ring belongs to one worker: after that worker's end its slots are useless, and the next Take
// opens a ring of the next worker. Slots that are held at that time keep their bytes.
//
// Thread-safe. The ring is opened at the first use.
#ifndef PQCACHED_CLIENT_LOCAL_STAGING_H_
#define PQCACHED_CLIENT_LOCAL_STAGING_H_

#include <chrono>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "client/base/remote.h"
#include "client/local/link.h"
#include "kernels/base/mutex.h"
#include "pqcached/client.h"

namespace pqcached::client {

class LocalSession;

class Staging {
 public:
  static constexpr uint64_t kDefaultSlotBytes = uint64_t{16} << 20;
  static constexpr uint32_t kDefaultSlotCount = 4;

  // Zeros select the defaults. REQUIRES: the session outlives the object.
  Staging(LocalSession& session, uint64_t slot_bytes, uint32_t slot_count);

  uint64_t slot_bytes() const { return slot_bytes_; }
  uint32_t slot_count() const { return slot_count_; }

  // A ring and the link over which it was opened.
  struct Ring {
    std::shared_ptr<LocalLink> link;
    std::shared_ptr<Mapping> memory;  // shared, as all mappings are
  };

  // A slot to write. Returned to the ring on destruction; a slot that is named in a call must be
  // Used first.
  //
  // Thread-compatible.
  class Slot {
   public:
    Slot() = default;
    Slot(Slot&& other) noexcept { *this = std::move(other); }
    Slot& operator=(Slot&& other) noexcept;
    ~Slot() { Return(); }

    bool valid() const { return owner_ != nullptr; }
    // Returns true while the slot's worker lives; no other worker accepts the slot.
    bool IsUsable() const { return valid() && ring_->link->IsValid(); }
    std::span<std::byte> bytes() const { return bytes_; }
    // Touches the slot's pages once, as huge pages where the machine has them. For callers that
    // fill much of a slot: their first rows do not wait for page faults, and later ones cause fewer
    // TLB misses.
    void Touch();
    uint32_t number() const { return number_; }
    // Returns the memory of all slots, for a caller that page-locks it.
    const std::shared_ptr<Mapping>& ring() const { return ring_->memory; }
    // Returns the reference by which the next call names bytes of the slot.
    StagingPlace Place(uint64_t offset_bytes, uint64_t size_bytes) const {
      return {number_, offset_bytes, size_bytes, generation_, ring_->link->boot_word()};
    }
    // Marks the slot's generation as used, whatever the answer, because a call that names the slot
    // is being sent. The next call, which may be sent before the slot is returned, has another
    // generation.
    void Use();
    // Returns true when the control memory says that the call after the last Use has ended.
    bool Done() const { return ring_->link->SlotGeneration(number_) >= generation_; }
    const LocalLink& link() const { return *ring_->link; }
    // Gives the slot up instead of returning it: the sidecar may still read it. REQUIRES: it was
    // Used.
    void Abandon();
    // Gives the slot up for good: a device may still write to it.
    void Lose();

   private:
    friend class Staging;
    void Return();
    // Ends the ownership; dispose(staging), under its lock, decides where the slot's number goes.
    template <class Dispose>
    void EndOwnership(const Dispose& dispose);

    Staging* owner_ = nullptr;
    std::shared_ptr<const Ring> ring_;  // shared with the ring's other slots
    std::span<std::byte> bytes_;
    uint32_t number_ = 0;
    uint64_t generation_ = 0;
  };

  // Opens the ring if it is not open. Does not wait for a worker. Errors: the host's,
  // PQC_UNAVAILABLE
  pqc_status Open();
  // Waits for a free slot.
  //
  // Errors: PQC_DEADLINE_EXCEEDED (all slots are in flight), PQC_RESOURCE_EXHAUSTED (all are
  //         abandoned or lost), the host's, PQC_UNAVAILABLE (no worker in time)
  pqc_status Take(std::chrono::steady_clock::time_point deadline, Slot* slot);
  // Takes a slot without waiting or opening the ring; otherwise leaves *slot unchanged. Succeeds if
  // one slot for each caller that waits in Take, and `left` more, remain free, or if all slots are
  // free.
  void TryTake(Slot* slot, uint32_t left = 1);

  // Returns references to the abandoned slots with new generations. When the sidecar accepts a call
  // with these references, which need not read the slots, it is done with all earlier calls and
  // accepts none of them later.
  std::vector<StagingPlace> Abandoned();

  // Drops the ring, because the worker that made it has ended.
  void DropRing();
  // Returns the boot word of the session's present worker; a new worker needs a new ring.
  uint64_t boot_word() const;

 private:
  pqc_status OpenLocked(const std::shared_ptr<LocalLink>& link) PQCACHED_REQUIRES(mutex_);
  Slot TakeLocked() PQCACHED_REQUIRES(mutex_);
  // Frees the abandoned slots that the sidecar is done with.
  void ReclaimLocked() PQCACHED_REQUIRES(mutex_);

  LocalSession& session_;
  const uint64_t slot_bytes_;
  const uint32_t slot_count_;
  base::Mutex mutex_;
  base::CondVar returned_;
  // Shared with slots.
  std::shared_ptr<const Ring> ring_ PQCACHED_GUARDED_BY(mutex_);
  std::vector<uint32_t> free_ PQCACHED_GUARDED_BY(mutex_);
  // Generation that the next call with the slot carries.
  std::vector<uint64_t> generations_ PQCACHED_GUARDED_BY(mutex_);
  std::vector<bool> touched_ PQCACHED_GUARDED_BY(mutex_);
  std::vector<uint32_t> abandoned_ PQCACHED_GUARDED_BY(mutex_);
  uint32_t lost_count_ PQCACHED_GUARDED_BY(mutex_) = 0;
  // Callers waiting in Take.
  uint32_t waiting_count_ PQCACHED_GUARDED_BY(mutex_) = 0;
};

// Returns true when the sidecar may still be processing a call that ended with this status, because
// the status may not be the sidecar's answer.
constexpr bool MayStillBeRead(pqc_status status) {
  return status == PQC_UNAVAILABLE || status == PQC_DEADLINE_EXCEEDED || status == PQC_CANCELLED ||
         status == PQC_UNKNOWN || status == PQC_INTERNAL;
}

// Writes indices [begin, end) of the first dimension to `to`, packed, with non-temporal stores
// where possible: the sidecar reads the bytes next, not this process.
void PackStreaming(const TensorView& tensor, uint64_t begin, uint64_t end, std::span<std::byte> to);

}  // namespace pqcached::client

#endif  // PQCACHED_CLIENT_LOCAL_STAGING_H_

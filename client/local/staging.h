// Staging: the ring of slots that rows pass through on their way to the sidecar.
//
// A slot is filled here, named in a call, and used again when the sidecar is done with it: the call is
// answered, or the control memory says so. When all are in flight, Take waits: that is the back-pressure.
// A slot whose call has no answer is abandoned until the control memory tells that the sidecar is done with
// it: it would change under a reader. One that a device may still write to is lost.
//
// The ring is of one worker: when that has ended, its slots are of no more use, and the next Take opens a
// ring of the next worker. Slots that are held keep their bytes meanwhile.
//
// Thread-safe. The ring is opened at the first use.
#ifndef PQCACHED_CLIENT_LOCAL_STAGING_H_
#define PQCACHED_CLIENT_LOCAL_STAGING_H_

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "client/local/link.h"
#include "client/remote.h"
#include "pqcached/client.h"

namespace pqcached::client {

class LocalSession;

class Staging {
 public:
  static constexpr uint64_t kDefaultSlotBytes = uint64_t{16} << 20;
  static constexpr uint32_t kDefaultSlotCount = 4;

  // Zeros = the defaults. The session outlives it.
  Staging(LocalSession& session, uint64_t slot_bytes, uint32_t slot_count);

  uint64_t slot_bytes() const { return slot_bytes_; }
  uint32_t slot_count() const { return slot_count_; }

  // A ring, and the link that it came over.
  struct Ring {
    std::shared_ptr<LocalLink> link;
    std::shared_ptr<Mapping> memory;  // shared as mappings are
  };

  // A slot to write. Given back when destroyed; a slot that was named in a call must be Used first.
  //
  // Thread-compatible.
  class Slot {
   public:
    Slot() = default;
    Slot(Slot&& other) noexcept { *this = std::move(other); }
    Slot& operator=(Slot&& other) noexcept;
    ~Slot() { Return(); }

    bool valid() const { return owner_ != nullptr; }
    // Whether its worker is still there; no other one takes it.
    bool Stands() const { return valid() && ring_->link->Stands(); }
    std::span<std::byte> bytes() const { return bytes_; }
    // Makes its pages present, unless that was done: huge ones where the machine has them. For who fills
    // much of it: the first rows do not wait for page after page, and later ones miss fewer of them.
    void Touch();
    uint32_t number() const { return number_; }
    // All slots, for whoever page-locks them.
    const std::shared_ptr<Mapping>& ring() const { return ring_->memory; }
    // How the next call names bytes of it.
    StagingPlace Place(uint64_t offset_bytes, uint64_t size_bytes) const {
      return {number_, offset_bytes, size_bytes, generation_, ring_->link->boot_word()};
    }
    // A call that names the slot is sent: its generation is used up, whatever the answer. The next
    // call, which may come before the slot is given back, has another one.
    void Use();
    // Whether the control memory tells that the call it was last Used for is over.
    bool Done() const { return ring_->link->SlotGeneration(number_) >= generation_; }
    const LocalLink& link() const { return *ring_->link; }
    // Instead of giving it back: the sidecar may still read it. REQUIRES: it was Used.
    void Abandon();
    // Likewise, for ever: a device may still write to it.
    void Lose();

   private:
    friend class Staging;
    void Return();
    // Ends to hold it; goes_to(staging), under its lock, says what becomes of the number.
    template <class GoesTo>
    void Leave(const GoesTo& goes_to);

    Staging* owner_ = nullptr;
    std::shared_ptr<const Ring> ring_;  // shared with its other slots
    std::span<std::byte> bytes_;
    uint32_t number_ = 0;
    uint64_t generation_ = 0;
  };

  // Opens the ring, when it is not open. Does not wait for a worker. Errors: the host's, PQC_UNAVAILABLE
  pqc_status Open();
  // Errors: PQC_DEADLINE_EXCEEDED (all slots are in flight), PQC_RESOURCE_EXHAUSTED (all are abandoned or lost),
  //         the host's, PQC_UNAVAILABLE (no worker in time)
  pqc_status Take(std::chrono::steady_clock::time_point deadline, Slot* slot);
  // Neither waits nor opens the ring; leaves *slot as it is when there is none to be had. As many as
  // wait, and `left` more, are left to those who do, unless there is only one in all.
  void TryTake(Slot* slot, uint32_t left = 1);

  // The abandoned slots, as the next call names them, which need not read them: when the sidecar takes it, it
  // is done with all calls before, and will take none of them any more.
  std::vector<StagingPlace> Abandoned();

  // The worker that made the ring has ended.
  void Forget();
  // Of the worker that the session has now; another one needs another ring.
  uint64_t boot_word() const;

 private:
  pqc_status OpenLocked(const std::shared_ptr<LocalLink>& link);
  Slot TakeLocked();
  // Those abandoned slots that the sidecar is done with are free again.
  void ReclaimLocked();

  LocalSession& session_;
  const uint64_t slot_bytes_;
  const uint32_t slot_count_;
  std::mutex mutex_;
  std::condition_variable returned_;
  std::shared_ptr<const Ring> ring_;  // shared with slots
  std::vector<uint32_t> free_;
  std::vector<uint64_t> generations_;  // that the next call with the slot carries
  std::vector<bool> touched_;
  std::vector<uint32_t> abandoned_;
  uint32_t lost_count_ = 0;
  uint32_t waiting_count_ = 0;  // in Take
};

// Whether the sidecar may still be at work on a call that ended so: the answer is not its own.
constexpr bool MayStillBeRead(pqc_status status) {
  return status == PQC_UNAVAILABLE || status == PQC_DEADLINE_EXCEEDED || status == PQC_CANCELLED ||
         status == PQC_UNKNOWN || status == PQC_INTERNAL;
}

// Writes indices [begin, end) of the first dimension to `to`, packed, around the caches where that
// is possible: the other side reads them, not this one.
void PackStreaming(const TensorView& tensor, uint64_t begin, uint64_t end, std::span<std::byte> to);

}  // namespace pqcached::client

#endif  // PQCACHED_CLIENT_LOCAL_STAGING_H_

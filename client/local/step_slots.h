// StepSlots allocates ranges of staging slots for the rows of steps.
//
// The rows of one step are few, and several steps may be in flight at once, so steps share slots:
// each takes the next range of a slot. A slot returns to the ring when none of its ranges is held;
// the rows of other ranges stay in place until then.
//
// Thread-safe. Outlives its ranges.
#ifndef PQCACHED_CLIENT_LOCAL_STEP_SLOTS_H_
#define PQCACHED_CLIENT_LOCAL_STEP_SLOTS_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "client/base/remote.h"
#include "client/local/staging.h"
#include "kernels/base/mutex.h"
#include "pqcached/client.h"

namespace pqcached::client {

class StepSlots {
 public:
  // A null `staging` means that there is no ring, and never a range.
  explicit StepSlots(Staging* staging) : staging_(staging) {}

  // A range of a slot's bytes. Released on destruction; the slot is abandoned when the sidecar may
  // still read it.
  class Range {
   public:
    Range() = default;
    Range(Range&& other) noexcept { *this = std::move(other); }
    Range& operator=(Range&& other) noexcept;
    ~Range() { Return(); }

    bool valid() const { return owner_ != nullptr; }
    // Returns true when a call may name the range, which means that its worker lives.
    bool IsUsable() const;
    std::span<std::byte> bytes() const { return bytes_; }
    // Returns the reference by which the next call names a part of the range. One thread at a time
    // makes calls.
    StagingPlace Place(uint64_t offset_bytes, uint64_t size_bytes) const;
    // Sets if the sidecar may still read the range: true from the end of an unanswered call that
    // names it, until the sidecar answers such a call. The sidecar accepts no second call with a
    // slot while the first is in flight.
    void SetMayBeRead(bool may_be_read);

   private:
    friend class StepSlots;
    void Return();

    StepSlots* owner_ = nullptr;
    size_t held_ = 0;  // index of the slot in StepSlots::held_
    uint64_t offset_bytes_ = 0;
    std::span<std::byte> bytes_;
    bool may_be_read_ = false;
  };

  // Opens the ring, so that ranges can be taken. Errors: the host's
  pqc_status Open() { return staging_ ? staging_->Open() : PQC_OK; }
  // Returns the boot word of the worker to which a ring would belong; 0 without staging.
  uint64_t boot_word() const { return staging_ ? staging_->boot_word() : 0; }
  // Returns the size of the largest range; 0 without staging.
  uint64_t max_bytes() const;
  // Takes a range without waiting; returns an invalid range when there is no room. `bytes` > 0.
  Range Take(uint64_t bytes);
  // Marks the generations as used, because a call is being sent with references that ranges have
  // returned.
  void Use();

 private:
  struct Held {
    Staging::Slot slot;
    uint64_t taken_bytes = 0;  // from the slot's beginning
    uint32_t range_count = 0;
    uint32_t may_be_read_count = 0;  // ranges, released ones included

    bool HasRoom(uint64_t bytes) const;
  };

  Range TakeLocked(size_t held, uint64_t bytes) PQCACHED_REQUIRES(mutex_);

  Staging* const staging_;
  base::Mutex mutex_;
  // One fills while the other drains.
  std::array<Held, 2> held_ PQCACHED_GUARDED_BY(mutex_);
};

}  // namespace pqcached::client

#endif  // PQCACHED_CLIENT_LOCAL_STEP_SLOTS_H_

// StepSlots: room in the staging ring for the rows of steps.
//
// Rows of a step are few, and several steps may be on their way at once, so they share slots: ranges
// of one slot after the other. A slot goes back to the ring when no range of it is held any more; rows
// of other ranges do not move meanwhile.
//
// Thread-safe. Outlives its ranges.
#ifndef PQCACHED_CLIENT_LOCAL_STEP_SLOTS_H_
#define PQCACHED_CLIENT_LOCAL_STEP_SLOTS_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <span>

#include "client/local/staging.h"
#include "client/remote.h"
#include "pqcached/client.h"

namespace pqcached::client {

class StepSlots {
 public:
  // Null: no ring, and never a range.
  explicit StepSlots(Staging* staging) : staging_(staging) {}

  // Bytes of a slot. Given back when destroyed; the slot is not used again when the sidecar may still
  // read them.
  class Range {
   public:
    Range() = default;
    Range(Range&& other) noexcept { *this = std::move(other); }
    Range& operator=(Range&& other) noexcept;
    ~Range() { Return(); }

    bool valid() const { return owner_ != nullptr; }
    // Whether a call may name it: its worker is still there.
    bool Stands() const;
    std::span<std::byte> bytes() const { return bytes_; }
    // How the next call names a part of it. One thread at a time makes calls.
    StagingPlace Place(uint64_t offset_bytes, uint64_t size_bytes) const;
    // From when a call is sent that names the range, until one that names it is answered by the
    // sidecar: it takes no second call with a slot while the first is at work.
    void SetMayBeRead(bool may_be_read);

   private:
    friend class StepSlots;
    void Return();

    StepSlots* owner_ = nullptr;
    size_t held_ = 0;  // which of the slots
    uint64_t offset_bytes_ = 0;
    std::span<std::byte> bytes_;
    bool may_be_read_ = false;
  };

  // Opens the ring, so that there may be ranges. Errors: the host's
  pqc_status Open() { return staging_ ? staging_->Open() : PQC_OK; }
  // Of the worker that a ring would be of; 0 without one.
  uint64_t boot_word() const { return staging_ ? staging_->boot_word() : 0; }
  // An invalid range when there is no room: does not wait. `bytes` > 0.
  Range Take(uint64_t bytes);
  // A call is sent with the places that ranges have told by now.
  void Use();

 private:
  struct Held {
    Staging::Slot slot;
    uint64_t taken_bytes = 0;  // from its begin
    uint32_t range_count = 0;
    uint32_t may_be_read_count = 0;  // ranges, those given back so included

    bool HasRoom(uint64_t bytes) const;
  };

  Range TakeLocked(size_t held, uint64_t bytes);

  Staging* const staging_;
  std::mutex mutex_;
  std::array<Held, 2> held_;  // one fills while the other drains
};

}  // namespace pqcached::client

#endif  // PQCACHED_CLIENT_LOCAL_STEP_SLOTS_H_

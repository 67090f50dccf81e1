// Staging: the ring of slots that rows pass through on their way to the sidecar.
//
// A slot is filled here, named in one Commit or Append, and used again when that call is answered. When
// all are in flight, Take waits: that is the back-pressure.
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

#include "client/local/host.h"
#include "client/remote.h"
#include "pqcached/client.h"

namespace pqcached::client {

class Staging {
 public:
  static constexpr uint64_t kDefaultSlotBytes = uint64_t{16} << 20;
  static constexpr uint32_t kDefaultSlotCount = 4;

  // Zeros = the defaults. The host outlives it.
  Staging(LocalHost& host, uint64_t slot_bytes, uint32_t slot_count);

  uint64_t slot_bytes() const { return slot_bytes_; }
  uint32_t slot_count() const { return slot_count_; }

  // A slot to write. Given back when destroyed; a slot that was named in a call must be Used first.
  class Slot {
   public:
    Slot() = default;
    Slot(Slot&& other) noexcept { *this = std::move(other); }
    Slot& operator=(Slot&& other) noexcept;
    ~Slot() { Return(); }

    bool valid() const { return owner_ != nullptr; }
    std::span<std::byte> bytes() const { return bytes_; }
    // How a message names bytes of it.
    StagingPlace Place(uint64_t offset_bytes, uint64_t size_bytes) const {
      return {number_, offset_bytes, size_bytes, generation_};
    }
    // A call that names the slot is sent: its generation is used up, whatever the answer.
    void Use();

   private:
    friend class Staging;
    void Return();

    Staging* owner_ = nullptr;
    std::span<std::byte> bytes_;
    uint32_t number_ = 0;
    uint64_t generation_ = 0;
  };

  // Errors: PQC_DEADLINE_EXCEEDED (all slots are in flight), the host's
  pqc_status Take(std::chrono::steady_clock::time_point deadline, Slot* slot);

 private:
  pqc_status OpenLocked();

  LocalHost& host_;
  const uint64_t slot_bytes_;
  const uint32_t slot_count_;
  std::mutex mutex_;
  std::condition_variable returned_;
  std::shared_ptr<Mapping> ring_;  // shared as mappings are
  std::vector<uint32_t> free_;
  std::vector<uint64_t> generations_;  // that the next call with the slot carries
};

// Writes indices [begin, end) of the first dimension to `to`, packed, around the caches where that
// is possible: the other side reads them, not this one.
void PackStreaming(const TensorView& tensor, uint64_t begin, uint64_t end, std::span<std::byte> to);

}  // namespace pqcached::client

#endif  // PQCACHED_CLIENT_LOCAL_STAGING_H_

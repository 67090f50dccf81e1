// RowPacker: K and V of a prefill, packed by an engine's stream into the staging ring that the sidecar reads.
//
// The ring is page-locked, by all packers that use it together. Each of its slots has an event, recorded behind the packing, so that whoever commits the slot
// knows when it is full, while the stream goes on with the next layer. Nothing here waits but Wait.
//
// Thread-safe but for Lock, which no other call may be beside, and for one slot: Pack, then Wait, then Pack again.
#ifndef PQCACHED_GPU_ROW_PACKER_H_
#define PQCACHED_GPU_ROW_PACKER_H_

#include <cstddef>
#include <cstdint>
#include <memory>

#include "gpu/device.h"
#include "gpu/status.h"
#include "gpu/steps.h"

namespace pqcached::gpu {

class RowPacker {
 public:
  RowPacker() = default;
  ~RowPacker();
  RowPacker(const RowPacker&) = delete;
  RowPacker& operator=(const RowPacker&) = delete;

  // Page-locks a ring, [slot_count, size_bytes / slot_count], in place of the one before, which nothing packs into any
  // more. It stays mapped until another one is locked or the packer ends.
  //
  // Errors: kOutOfMemory, kFailed  the system refuses (limit of locked memory, cgroup)
  Status Lock(std::byte* ring, size_t size_bytes, uint32_t slot_count);

  // REQUIRES: both targets, with their block tables, lie in slot `slot` of the ring.
  // Errors: those of the launches
  Status Pack(const StepPack& pack, uint32_t slot);

  // Until the slot's last Pack is done. Errors: kFailed  the device has failed; the slot may be written still
  Status Wait(uint32_t slot);

 private:
  Status PackOne(const StepPackTensor& from, const StepPack& pack);
  void Unlock();
  // Where the device finds what lies in the ring.
  template <typename T>
  T* OnDevice(T* in_ring) const {
    const auto offset = reinterpret_cast<uintptr_t>(in_ring) - reinterpret_cast<uintptr_t>(ring_);
    return reinterpret_cast<T*>(device_ring_ + offset);
  }

  std::byte* ring_ = nullptr;
  std::byte* device_ring_ = nullptr;
  uint32_t slot_count_ = 0;
  std::unique_ptr<OwnedEvent[]> packed_;  // [slot_count_]
};

}  // namespace pqcached::gpu

#endif  // PQCACHED_GPU_ROW_PACKER_H_

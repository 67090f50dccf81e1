// RowPacker packs the K and V of a prefill, on the engine's stream, into the staging ring that the
// sidecar reads.
//
// The ring is page-locked; packers that use the same ring share the lock. Each slot has an event,
// recorded after its packing, so that the thread that commits the slot learns when it is full,
// while the stream continues with the next layer. Only Wait blocks.
//
// Thread-safe with two exceptions: no other call may run concurrently with Lock, and the calls for
// one slot are Pack, then Wait, then Pack again.
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

  // Page-locks a ring, [slot_count, size_bytes / slot_count], and unlocks the previous one, which
  // must not be packed into any more. The ring must stay mapped until another one is locked or the
  // packer is destroyed.
  //
  // Errors: kOutOfMemory, kFailed  the system refuses (limit of locked memory, cgroup)
  Status Lock(std::byte* ring, size_t size_bytes, uint32_t slot_count);

  // Launches the packing of `pack` into slot `slot`.
  //
  // REQUIRES: both targets, with their block tables, lie in slot `slot` of the ring.
  // Errors: kInvalid  no such slot, or no ring; also those of the launches
  Status Pack(const StepPack& pack, uint32_t slot);

  // Waits until the slot's last Pack is done.
  // Errors: kFailed  the device failed and may still write to the slot
  Status Wait(uint32_t slot);

 private:
  Status PackOne(const StepPackTensor& from, const StepPack& pack);
  void Unlock();
  // Converts an address in the ring to the device's address.
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

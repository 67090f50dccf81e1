#include "gpu/row_packer.h"

#include <string>

#include "kernels/base/status_macros.h"
#include "kernels/cuda/pack.h"

namespace pqcached::gpu {

RowPacker::~RowPacker() { Unlock(); }

void RowPacker::Unlock() {
  if (ring_ != nullptr) UnlockHostMemory(ring_);
  ring_ = device_ring_ = nullptr;
  packed_.reset();
}

Status RowPacker::Lock(std::byte* ring, size_t size_bytes, uint32_t slot_count) {
  const RelaxedCaptureMode
      beside;  // page-locking is otherwise an error while other threads capture
  Unlock();
  RETURN_IF_ERROR(LockHostMemory(ring, size_bytes, HostAccess::kReadWrite, device_ring_));
  ring_ = ring;
  slot_count_ = slot_count;
  packed_ = std::make_unique<OwnedEvent[]>(slot_count);
  for (uint32_t slot = 0; slot < slot_count; ++slot) {
    if (Status status = packed_[slot].Create(OwnedEvent::Waiting::kSleeps); !status.ok()) {
      Unlock();
      return status;
    }
  }
  return {};
}

Status RowPacker::Pack(const StepPack& pack, uint32_t slot) {
  if (slot >= slot_count_ || ring_ == nullptr) {
    return {Code::kInvalid, "slot " + std::to_string(slot) + " of no ring that is locked"};
  }
  RETURN_IF_ERROR(PackOne(pack.keys, pack));
  RETURN_IF_ERROR(PackOne(pack.values, pack));
  return packed_[slot].Record(static_cast<kernels::cuda::Stream>(pack.stream));
}

// Packs keys or values as [tokens, heads, dim] without gaps: rows of one part, whose heads are
// adjacent.
Status RowPacker::PackOne(const StepPackTensor& from, const StepPack& pack) {
  if (from.to == nullptr) return {};
  const size_t head_bytes = from.dim * kernels::DTypeBytes(from.packed_dtype);
  return FromKernel(
      kernels::cuda::PackRows(
          {.token_count = pack.token_count,
           .first_token = from.first_token,
           .head_count = pack.kv_heads,
           .key_dim = from.dim,
           .value_dim = 0,
           .key = {.data = static_cast<const std::byte*>(from.data),
                   .dtype = from.dtype,
                   .block_stride = from.block_stride,
                   .token_stride = from.token_stride,
                   .head_stride = from.head_stride},
           .value = {},
           .block_table = from.block_table == nullptr ? nullptr : OnDevice(from.block_table),
           .block_tokens = from.block_tokens,
           .row_dtype = from.packed_dtype,
           .rows = OnDevice(from.to),
           .head_stride_bytes = head_bytes,
           .row_stride_bytes = head_bytes * pack.kv_heads},
          static_cast<kernels::cuda::Stream>(pack.stream)),
      "packing rows into staging");
}

Status RowPacker::Wait(uint32_t slot) {
  const RelaxedCaptureMode beside;
  return packed_[slot].Wait();
}

}  // namespace pqcached::gpu

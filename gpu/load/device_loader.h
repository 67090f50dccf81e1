// DeviceLoader implements RowLoader on one device.
#ifndef PQCACHED_GPU_LOAD_DEVICE_LOADER_H_
#define PQCACHED_GPU_LOAD_DEVICE_LOADER_H_

#include <memory>
#include <mutex>
#include <vector>

#include "gpu/device.h"
#include "gpu/load/row_loader.h"
#include "gpu/page_lock.h"
#include "gpu/status.h"

namespace pqcached::gpu {

class DeviceLoader final : public RowLoader {
 public:
  // Opens a loader for the device that has `target`.
  //
  // Errors: those of FindDevice; kInvalid  pageable memory of the host
  static Status Open(const void* target, std::unique_ptr<DeviceLoader>& loader);
  // REQUIRES: the device is current.
  ~DeviceLoader();

  Outcome CheckTarget(const void* memory) override;
  Outcome Follow(void* stream) override;
  Outcome SetPool(const std::byte* pool, size_t pool_bytes) override;
  Outcome Begin(const LoadShape& shape) override;
  Outcome Write(const LoadRows& rows) override;
  Outcome Finish() override;
  void Close() override;

 private:
  static constexpr uint32_t kSlots = 2;
  static constexpr size_t kSlotBytes = size_t{4} << 20;

  DeviceLoader() = default;

  Status Create();
  Status CopyOffsets();
  bool FindInPool(const LoadRows& rows, std::vector<const std::byte*>& addresses);
  const std::byte* FindHeadInPool(const std::byte* rows, size_t size_bytes);
  Status StageRows(const LoadRows& rows);
  Status Unpack(uint64_t first_token, uint32_t token_count,
                const std::vector<const std::byte*>& addresses);
  size_t row_bytes() const {
    return (size_t{shape_.key_dim} + shape_.value_dim) * kernels::DTypeBytes(shape_.row_dtype);
  }

  Device device_;
  OwnedStream stream_;
  OwnedEvent followed_;  // the engine's work, before the copies
  OwnedEvent done_;

  const std::byte* pool_ = nullptr;
  size_t pool_bytes_ = 0;
  std::unique_ptr<PageLock> page_lock_;
  bool locks_pool_ = false;  // false: a piece could not be locked

  LoadShape shape_;
  PinnedBuffer host_offsets_;  // those of the keys, then those of the values
  DeviceBuffer offsets_;
  const int64_t* key_offsets_ = nullptr;  // in offsets_, or null
  const int64_t* value_offsets_ = nullptr;

  std::mutex mutex_;      // held by Write
  PinnedBuffer staging_;  // [kSlots, kSlotBytes], allocated when rows are first staged
  OwnedEvent copied_[kSlots];
  uint32_t next_slot_ = 0;
};

}  // namespace pqcached::gpu

#endif  // PQCACHED_GPU_LOAD_DEVICE_LOADER_H_

// PageLock page-locks a read-only mapping piece by piece, so that kernels read it in place.
//
// A piece is locked when Lock first requests it. Rows in a piece that cannot be locked are copied
// by the host (row_staging.h). Devices that read the same mapping share its locks. Thread-safe.
// Locking a piece takes milliseconds and holds a mutex; lookups of locked pieces do not take it.
#ifndef PQCACHED_GPU_PAGE_LOCK_H_
#define PQCACHED_GPU_PAGE_LOCK_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>

#include "gpu/device.h"
#include "gpu/status.h"

namespace pqcached::gpu {

class PageLock {
 public:
  static constexpr size_t kPieceBytes = size_t{64} << 20;

  // Locks nothing yet. The mapping must outlive this object. `piece_bytes` is a multiple of the
  // page size.
  PageLock(const Device& device, const std::byte* mapping, size_t size_bytes,
           size_t piece_bytes = kPieceBytes);
  // Unlocks all pieces. REQUIRES: no kernel reads the mapping any more.
  ~PageLock();
  PageLock(const PageLock&) = delete;
  PageLock& operator=(const PageLock&) = delete;

  // Locks the pieces that [begin_bytes, begin_bytes + size_bytes) touches. When a piece fails,
  // those locked before it stay locked.
  //
  // Errors: kInvalid      the range is outside the mapping
  //         kUnsupported  the device cannot lock memory that this process may not write: use
  //                       staging
  //         kOutOfMemory, kFailed  the system refuses (limit of locked memory, cgroup)
  Status Lock(size_t begin_bytes, size_t size_bytes);

  // Returns the device address of byte `offset_bytes`, or null while its piece is not locked.
  // Adjacent pieces need not be adjacent on the device: look up a range that crosses pieces piece
  // by piece.
  const std::byte* DeviceAddress(size_t offset_bytes) const;

  size_t piece_bytes() const { return piece_bytes_; }
  size_t locked_bytes() const { return locked_bytes_.load(std::memory_order_relaxed); }

 private:
  Status LockPiece(size_t piece);

  const std::byte* mapping_;
  size_t size_bytes_;
  size_t piece_bytes_;
  size_t piece_count_;
  bool read_only_supported_;
  std::mutex mutex_;  // held while a piece is locked
  std::unique_ptr<std::atomic<const std::byte*>[]>
      device_pieces_;  // [piece_count_], null: not locked
  std::atomic<size_t> locked_bytes_ = 0;
};

}  // namespace pqcached::gpu

#endif  // PQCACHED_GPU_PAGE_LOCK_H_

#include "gpu/page_lock.h"
#include "kernels/base/status_macros.h"

#include <algorithm>
#include <string>

namespace pqcached::gpu {

PageLock::PageLock(const Device& device, const std::byte* mapping, size_t size_bytes,
                   size_t piece_bytes)
    : mapping_(mapping),
      size_bytes_(size_bytes),
      piece_bytes_(piece_bytes),
      piece_count_((size_bytes + piece_bytes - 1) / piece_bytes),
      read_only_supported_(device.registers_read_only),
      device_pieces_(std::make_unique<std::atomic<const std::byte*>[]>(piece_count_)) {}

PageLock::~PageLock() {
  for (size_t piece = 0; piece < piece_count_; ++piece) {
    if (device_pieces_[piece].load() == nullptr) continue;
    UnlockHostMemory(const_cast<std::byte*>(mapping_) + piece * piece_bytes_);
  }
}

Status PageLock::Lock(size_t begin_bytes, size_t size_bytes) {
  if (begin_bytes > size_bytes_ || size_bytes > size_bytes_ - begin_bytes) {
    return {Code::kInvalid, "bytes [" + std::to_string(begin_bytes) + ", + " +
                                std::to_string(size_bytes) + ") of a mapping of " +
                                std::to_string(size_bytes_)};
  }
  if (size_bytes == 0) return {};
  const size_t last = (begin_bytes + size_bytes - 1) / piece_bytes_;
  for (size_t piece = begin_bytes / piece_bytes_; piece <= last; ++piece) {
    if (device_pieces_[piece].load(std::memory_order_acquire) != nullptr) continue;
    RETURN_IF_ERROR(LockPiece(piece));
  }
  return {};
}

const std::byte* PageLock::DeviceAddress(size_t offset_bytes) const {
  if (offset_bytes >= size_bytes_) return nullptr;
  const std::byte* piece =
      device_pieces_[offset_bytes / piece_bytes_].load(std::memory_order_acquire);
  return piece == nullptr ? nullptr : piece + offset_bytes % piece_bytes_;
}

Status PageLock::LockPiece(size_t piece) {
  if (!read_only_supported_) {
    return {Code::kUnsupported, "the device cannot page-lock memory that is mapped read-only"};
  }
  const std::lock_guard lock(mutex_);
  if (device_pieces_[piece].load(std::memory_order_acquire) != nullptr) return {};
  // cudaHostRegister takes no const pointer, but does not write.
  auto* const memory = const_cast<std::byte*>(mapping_) + piece * piece_bytes_;
  const size_t bytes = std::min(piece_bytes_, size_bytes_ - piece * piece_bytes_);
  std::byte* address = nullptr;
  RETURN_IF_ERROR(LockHostMemory(memory, bytes, HostAccess::kRead, address));
  device_pieces_[piece].store(address, std::memory_order_release);
  locked_bytes_.fetch_add(bytes, std::memory_order_relaxed);
  return {};
}

}  // namespace pqcached::gpu

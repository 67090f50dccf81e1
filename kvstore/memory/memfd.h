// Memfds: memory of a fixed size and mode 0600 that other processes may map.
//
// The holder of a descriptor cannot change the size. A descriptor that was opened read-only cannot
// be reopened for writing by another uid, because of the mode; root can reopen it for writing
// unless the seals forbid it.
//
// Thread-safe.
#ifndef PQCACHED_KVSTORE_MEMORY_MEMFD_H_
#define PQCACHED_KVSTORE_MEMORY_MEMFD_H_

#include <cstddef>
#include <span>

#include "absl/status/statusor.h"
#include "kvstore/local_session.h"

namespace pqcached::kvstore {

// Creates a memfd that is sealed against shrinking and growing. `name` is shown in /proc.
//
// Errors: kResourceExhausted  the kernel refuses
absl::StatusOr<FileDescriptor> CreateMemfd(const char* name, size_t size_bytes);

enum class WriteSeal {
  kNone,
  // Only the mappings that exist now can write; no process can map it for writing later, not even
  // root's.
  kFutureWrite,
};
// Adds the last seals. To be called before a descriptor is sent to another process.
absl::Status SealMemfd(const FileDescriptor& memfd, WriteSeal seal);
// Returns whether the memory was sealed with WriteSeal::kFutureWrite.
bool HasFutureWriteSeal(const FileDescriptor& memory);

// Returns a read-only descriptor of the same memory.
absl::StatusOr<FileDescriptor> OpenReadOnly(int memfd);
// Returns the size in bytes, or 0 if it cannot be determined.
size_t SizeOf(const FileDescriptor& memory);
// Returns another descriptor of the same open file.
absl::StatusOr<FileDescriptor> Duplicate(int descriptor);

// Shared mapping of a whole memfd, at an address that huge pages can back. Movable.
class Mapping {
 public:
  enum class Access { kRead, kReadWrite };

  Mapping() = default;
  static absl::StatusOr<Mapping> Map(const FileDescriptor& memfd, size_t size_bytes, Access access);
  Mapping(Mapping&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), size_bytes_(other.size_bytes_) {}
  Mapping& operator=(Mapping&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_bytes_, other.size_bytes_);
    return *this;
  }
  ~Mapping();

  std::byte* data() const { return data_; }
  size_t size_bytes() const { return size_bytes_; }

 private:
  Mapping(std::byte* data, size_t size_bytes) : data_(data), size_bytes_(size_bytes) {}

  std::byte* data_ = nullptr;
  size_t size_bytes_ = 0;
};

// Allocates all pages of writable shared memory, so that no store into it can be a SIGBUS. `name`:
// for the message.
//
// Errors: kResourceExhausted  the kernel refuses
absl::Status AllocatePages(std::span<std::byte> memory, const char* name);

}  // namespace pqcached::kvstore

#endif  // PQCACHED_KVSTORE_MEMORY_MEMFD_H_

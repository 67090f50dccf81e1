// Memory that other processes may map: memfds of a fixed size with mode 0600.
//
// Nobody who gets a descriptor can change the size. One that was opened read-only cannot be opened
// again for writing by another uid, because of the mode; by root only as far as the seals allow.
//
// Thread-safe.
#ifndef PQCACHED_KVSTORE_MEMFD_H_
#define PQCACHED_KVSTORE_MEMFD_H_

#include <cstddef>

#include "absl/status/statusor.h"
#include "kvstore/local_session.h"

namespace pqcached::kvstore {

// Sealed against shrinking and growing. `name` is for people who look at /proc.
//
// Errors: kResourceExhausted  the kernel refuses
absl::StatusOr<FileDescriptor> CreateMemfd(const char* name, size_t size_bytes);

enum class LaterWriters {
  kAllowed,
  kNever,  // only mappings that exist now can write; nobody else ever again, not even root
};
// Adds the last seals; before a descriptor leaves this process.
absl::Status SealMemfd(const FileDescriptor& memfd, LaterWriters writers);
// Whether that was done with kNever.
bool NeverHasLaterWriters(const FileDescriptor& memory);

// A descriptor of the same memory that can only read.
absl::StatusOr<FileDescriptor> OpenReadOnly(int memfd);
// 0 when it cannot be known.
size_t SizeOf(const FileDescriptor& memory);
// A descriptor of the same open file.
absl::StatusOr<FileDescriptor> Duplicate(int descriptor);

// A shared mapping of a whole memfd, at an address that huge pages can back. Movable.
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

}  // namespace pqcached::kvstore

#endif  // PQCACHED_KVSTORE_MEMFD_H_

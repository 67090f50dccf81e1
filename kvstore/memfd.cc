#include "kvstore/memfd.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string>

#include "absl/strings/str_cat.h"

#ifndef F_SEAL_FUTURE_WRITE
#define F_SEAL_FUTURE_WRITE 0x0010
#endif

namespace pqcached::kvstore {
namespace {

constexpr size_t kHugePageBytes = size_t{2} << 20;

absl::Status SystemError(absl::string_view what) {
  return absl::ResourceExhaustedError(absl::StrCat(what, ": ", std::strerror(errno)));
}

}  // namespace

FileDescriptor::~FileDescriptor() {
  if (descriptor_ >= 0) close(descriptor_);
}

absl::StatusOr<FileDescriptor> CreateMemfd(const char* name, size_t size_bytes) {
  FileDescriptor memfd(memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!memfd.valid()) return SystemError(absl::StrCat(name, ": memfd_create"));
  if (ftruncate(memfd.get(), static_cast<off_t>(size_bytes)) != 0 ||
      fchmod(memfd.get(), 0600) != 0 ||
      fcntl(memfd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) != 0) {
    return SystemError(absl::StrCat(name, ": sizing to ", size_bytes, " bytes"));
  }
  return memfd;
}

absl::Status SealMemfd(const FileDescriptor& memfd, LaterWriters writers) {
  if (writers == LaterWriters::kNever &&
      fcntl(memfd.get(), F_ADD_SEALS, F_SEAL_FUTURE_WRITE) != 0) {
    return SystemError("F_SEAL_FUTURE_WRITE");
  }
  if (fcntl(memfd.get(), F_ADD_SEALS, F_SEAL_SEAL) != 0) return SystemError("F_SEAL_SEAL");
  return absl::OkStatus();
}

bool NeverHasLaterWriters(const FileDescriptor& memory) {
  const int seals = fcntl(memory.get(), F_GET_SEALS);
  return seals >= 0 && (seals & F_SEAL_FUTURE_WRITE) != 0;
}

absl::StatusOr<FileDescriptor> OpenReadOnly(int memfd) {
  const std::string path = absl::StrCat("/proc/self/fd/", memfd);
  FileDescriptor descriptor(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!descriptor.valid()) return SystemError(path);
  return descriptor;
}

size_t SizeOf(const FileDescriptor& memory) {
  struct stat info = {};
  return memory.valid() && fstat(memory.get(), &info) == 0 ? static_cast<size_t>(info.st_size) : 0;
}

absl::StatusOr<FileDescriptor> Duplicate(int descriptor) {
  FileDescriptor copy(fcntl(descriptor, F_DUPFD_CLOEXEC, 0));
  if (!copy.valid()) return SystemError("F_DUPFD_CLOEXEC");
  return copy;
}

absl::StatusOr<Mapping> Mapping::Map(const FileDescriptor& memfd, size_t size_bytes,
                                     Access access) {
  const int protection = access == Access::kRead ? PROT_READ : PROT_READ | PROT_WRITE;
  void* data = mmap(nullptr, size_bytes, protection, MAP_SHARED, memfd.get(), 0);
  if (data == MAP_FAILED) return SystemError(absl::StrCat("mapping ", size_bytes, " bytes"));
  return Mapping(static_cast<std::byte*>(data), size_bytes);
}

absl::StatusOr<Mapping> Mapping::MapAligned(const FileDescriptor& memfd, size_t size_bytes) {
  const size_t reserved_bytes = size_bytes + kHugePageBytes;
  void* reserved =
      mmap(nullptr, reserved_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (reserved == MAP_FAILED) return SystemError(absl::StrCat("mapping ", size_bytes, " bytes"));
  auto* begin = static_cast<std::byte*>(reserved);
  const size_t misaligned = reinterpret_cast<uintptr_t>(begin) % kHugePageBytes;
  std::byte* data = begin + (misaligned == 0 ? 0 : kHugePageBytes - misaligned);
  std::byte* end = data + size_bytes;
  if (mmap(data, size_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, memfd.get(), 0) ==
      MAP_FAILED) {
    const absl::Status status = SystemError(absl::StrCat("mapping ", size_bytes, " bytes"));
    munmap(reserved, reserved_bytes);
    return status;
  }
  if (data > begin) munmap(begin, static_cast<size_t>(data - begin));
  const auto behind_bytes = static_cast<size_t>(begin + reserved_bytes - end);
  if (behind_bytes > 0) munmap(end, behind_bytes);
  return Mapping(data, size_bytes);
}

Mapping::~Mapping() {
  if (data_ != nullptr) munmap(data_, size_bytes_);
}

}  // namespace pqcached::kvstore

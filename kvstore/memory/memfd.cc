#include "kvstore/memory/memfd.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string>

#include "absl/strings/str_cat.h"
#include "kvstore/read/pages.h"
#include "kvstore/refusal.h"

#ifndef F_SEAL_FUTURE_WRITE
#define F_SEAL_FUTURE_WRITE 0x0010
#endif

namespace pqcached::kvstore {
namespace {

absl::Status SystemError(absl::string_view what) {
  const bool descriptors = errno == EMFILE || errno == ENFILE;
  return ShortOf(descriptors ? Shortage::kDescriptors : Shortage::kMemory, "",
                 absl::StrCat(what, ": ", std::strerror(errno)), kRetryMemory);
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

absl::Status SealMemfd(const FileDescriptor& memfd, WriteSeal seal) {
  if (seal == WriteSeal::kFutureWrite &&
      fcntl(memfd.get(), F_ADD_SEALS, F_SEAL_FUTURE_WRITE) != 0) {
    return SystemError("F_SEAL_FUTURE_WRITE");
  }
  if (fcntl(memfd.get(), F_ADD_SEALS, F_SEAL_SEAL) != 0) return SystemError("F_SEAL_SEAL");
  return absl::OkStatus();
}

bool HasFutureWriteSeal(const FileDescriptor& memory) {
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
  std::byte* const data = MapMemory(memfd.get(), size_bytes, protection);
  if (data == nullptr) return SystemError(absl::StrCat("mapping ", size_bytes, " bytes"));
  return Mapping(data, size_bytes);
}

Mapping::~Mapping() {
  if (data_ != nullptr) UnmapMemory(data_, size_bytes_);
}

absl::Status AllocatePages(std::span<std::byte> memory, const char* name) {
  if (PopulatePages(memory).present) return absl::OkStatus();
  return ShortOf(Shortage::kMemory, "",
                 absl::StrCat(name, ": ", memory.size(), " bytes wanted; the kernel refuses them"),
                 kRetryMemory);
}

}  // namespace pqcached::kvstore

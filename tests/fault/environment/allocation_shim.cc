// A kernel that has no memory from a chosen allocation on: a library for LD_PRELOAD. It counts the calls by
// which the sidecar gets shared memory and files, and lets them fail as those on a full tmpfs do.
#include "allocation_shim.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/types.h>
#include <unistd.h>

#include <cerrno>
#include <cstdarg>
#include <cstdlib>

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace {

using pqcached::testing::ShimmedAllocations;

template <typename Function>
Function* Next(const char* name) {
  return reinterpret_cast<Function*>(dlsym(RTLD_NEXT, name));
}

// Null: the test did not name a file.
ShimmedAllocations* Map() {
  const char* path = getenv(pqcached::testing::kAllocationShimVariable);
  const int file = path == nullptr ? -1 : open(path, O_RDWR | O_CLOEXEC);
  if (file < 0) return nullptr;
  void* const page =
      mmap(nullptr, sizeof(ShimmedAllocations), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  return page == MAP_FAILED ? nullptr : static_cast<ShimmedAllocations*>(page);
}

// Counts an allocation. Returns false, with errno, when it is one of those that fail.
bool Allows(int error) {
  static ShimmedAllocations* const shared = Map();
  if (shared == nullptr || shared->fails == ShimmedAllocations::kNone) return true;
  const int64_t left = shared->left.fetch_sub(1);
  if (left > 0 || (left < 0 && shared->fails == ShimmedAllocations::kOne)) return true;
  ++shared->failed;
  errno = error;
  return false;
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

int madvise(void* begin, size_t size, int advice) noexcept {
  static auto* const next = Next<int(void*, size_t, int)>("madvise");
  return advice != MADV_POPULATE_WRITE || Allows(EFAULT) ? next(begin, size, advice) : -1;
}

int memfd_create(const char* name, unsigned flags) noexcept {
  static auto* const next = Next<int(const char*, unsigned)>("memfd_create");
  return Allows(ENOMEM) ? next(name, flags) : -1;
}

int ftruncate(int file, off_t size) noexcept {
  static auto* const next = Next<int(int, off_t)>("ftruncate");
  return Allows(ENOSPC) ? next(file, size) : -1;
}

int linkat(int from, const char* path, int to, const char* name, int flags) noexcept {
  static auto* const next = Next<int(int, const char*, int, const char*, int)>("linkat");
  return Allows(ENOSPC) ? next(from, path, to, name, flags) : -1;
}

int openat(int folder, const char* path, int flags, ...) {
  static auto* const next = Next<int(int, const char*, int, ...)>("openat");
  va_list arguments;
  va_start(arguments, flags);
  const mode_t mode = (flags & O_CREAT) != 0 || (flags & O_TMPFILE) == O_TMPFILE
                          ? static_cast<mode_t>(va_arg(arguments, int))
                          : 0;
  va_end(arguments);
  return (flags & O_TMPFILE) != O_TMPFILE || Allows(ENOSPC) ? next(folder, path, flags, mode) : -1;
}
}
#pragma GCC visibility pop

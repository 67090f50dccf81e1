// SmallVolume: an empty tmpfs of a few MiB without a place in the tree; it ends with the object.
#ifndef PQCACHED_TESTS_KVSTORE_SMALL_VOLUME_H_
#define PQCACHED_TESTS_KVSTORE_SMALL_VOLUME_H_

#include <fcntl.h>
#include <sys/mount.h>
#include <unistd.h>

#include <string>

#include "kvstore/memory/memfd.h"

namespace pqcached::kvstore::testing {

class SmallVolume {
 public:
  explicit SmallVolume(size_t size_bytes) {
    const FileDescriptor made(fsopen("tmpfs", FSOPEN_CLOEXEC));
    const std::string size = std::to_string(size_bytes);
    if (!made.valid() || fsconfig(made.get(), FSCONFIG_SET_STRING, "size", size.c_str(), 0) != 0 ||
        fsconfig(made.get(), FSCONFIG_SET_STRING, "mode", "0700", 0) != 0 ||
        fsconfig(made.get(), FSCONFIG_CMD_CREATE, nullptr, nullptr, 0) != 0) {
      return;
    }
    root_ = FileDescriptor(fsmount(made.get(), FSMOUNT_CLOEXEC, 0));
  }

  // Returns false where the kernel does not allow this process to mount.
  bool valid() const { return root_.valid(); }
  std::string path() const { return "/proc/self/fd/" + std::to_string(root_.get()); }

  // Fills the volume with another program's file, except for the last `left_bytes`.
  void FillUp(size_t left_bytes) {
    other_ = FileDescriptor(openat(root_.get(), "other", O_RDWR | O_CREAT | O_CLOEXEC, 0600));
    off_t size = 0;
    for (const off_t step : {off_t{1} << 20, off_t{4096}}) {
      while (posix_fallocate(other_.get(), size, step) == 0) size += step;
    }
    if (ftruncate(other_.get(), size - static_cast<off_t>(left_bytes)) != 0) other_ = {};
  }
  // Removes that file's bytes.
  bool FreeUp() const { return ftruncate(other_.get(), 0) == 0; }

 private:
  FileDescriptor root_;
  FileDescriptor other_;
};

}  // namespace pqcached::kvstore::testing

#endif  // PQCACHED_TESTS_KVSTORE_SMALL_VOLUME_H_

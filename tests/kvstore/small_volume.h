// Volumes without a place in the tree, which end with their objects. SmallVolume: an empty tmpfs of
// a few MiB.
#ifndef PQCACHED_TESTS_KVSTORE_SMALL_VOLUME_H_
#define PQCACHED_TESTS_KVSTORE_SMALL_VOLUME_H_

#include <fcntl.h>
#include <sys/mount.h>
#include <unistd.h>

#include <string>
#include <utility>
#include <vector>

#include "kvstore/memory/memfd.h"

namespace pqcached::kvstore::testing {

class Volume {
 public:
  using Option = std::pair<const char*, std::string>;

  // Returns false where the kernel does not allow this process to mount.
  bool valid() const { return root_.valid(); }
  std::string path() const { return "/proc/self/fd/" + std::to_string(root_.get()); }
  // The path for other processes, which open the volume through this one.
  std::string PathForOthers() const {
    return "/proc/" + std::to_string(getpid()) + "/fd/" + std::to_string(root_.get());
  }

  // Fills the volume with another program's file, except for the last `left_bytes`.
  void FillUp(size_t left_bytes) {
    other_ = FileDescriptor(openat(root_.get(), "other", O_RDWR | O_CREAT | O_CLOEXEC, 0600));
    off_t size = 0;
    for (const off_t step : {off_t{2} << 20, page_bytes_}) {
      while (posix_fallocate(other_.get(), size, step) == 0) size += step;
    }
    if (ftruncate(other_.get(), size - static_cast<off_t>(left_bytes)) != 0) other_ = {};
  }
  // Removes that file's bytes.
  bool FreeUp() const { return ftruncate(other_.get(), 0) == 0; }

 protected:
  Volume(const char* file_system, const std::vector<Option>& options, off_t page_bytes = 4096)
      : page_bytes_(page_bytes) {
    const FileDescriptor made(fsopen(file_system, FSOPEN_CLOEXEC));
    if (!made.valid()) return;
    for (const auto& [key, value] : options) {
      if (fsconfig(made.get(), FSCONFIG_SET_STRING, key, value.c_str(), 0) != 0) return;
    }
    if (fsconfig(made.get(), FSCONFIG_CMD_CREATE, nullptr, nullptr, 0) != 0) return;
    root_ = FileDescriptor(fsmount(made.get(), FSMOUNT_CLOEXEC, 0));
  }

 private:
  const off_t page_bytes_;
  FileDescriptor root_;
  FileDescriptor other_;
};

class SmallVolume : public Volume {
 public:
  explicit SmallVolume(size_t size_bytes)
      : Volume("tmpfs", {{"size", std::to_string(size_bytes)}, {"mode", "0700"}}) {}
};

}  // namespace pqcached::kvstore::testing

#endif  // PQCACHED_TESTS_KVSTORE_SMALL_VOLUME_H_

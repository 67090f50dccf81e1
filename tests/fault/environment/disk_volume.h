// DiskVolume: a small disk with ext4, in an image.
#ifndef PQCACHED_TESTS_FAULT_ENVIRONMENT_DISK_VOLUME_H_
#define PQCACHED_TESTS_FAULT_ENVIRONMENT_DISK_VOLUME_H_

#include <fcntl.h>
#include <linux/loop.h>
#include <sys/ioctl.h>

#include <cstdint>
#include <string>

#include "tests/client/process.h"
#include "tests/kvstore/small_volume.h"

namespace pqcached::testing {

using kvstore::FileDescriptor;

// The image is a file without a name, and the loop device ends with its last user.
class LoopDevice {
 public:
  explicit LoopDevice(uint64_t size_bytes) {
    TempFolder folder;
    const std::string path = folder.File("image");
    const FileDescriptor image(open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
    if (ftruncate(image.get(), static_cast<off_t>(size_bytes)) != 0) return;
    const Outcome made = RunProgram({"/sbin/mkfs.ext4", "-q", "-F", "-m", "0", "-O", "^has_journal",
                                     "-E", "root_owner=0:0", path});
    const FileDescriptor control(open("/dev/loop-control", O_RDWR | O_CLOEXEC));
    if (made.exit_code != 0 || !control.valid()) return;
    const int number = ioctl(control.get(), LOOP_CTL_GET_FREE);
    if (number < 0) return;
    path_ = "/dev/loop" + std::to_string(number);
    device_ = FileDescriptor(open(path_.c_str(), O_RDWR | O_CLOEXEC));
    loop_config config = {};
    config.fd = static_cast<uint32_t>(image.get());
    config.info.lo_flags = LO_FLAGS_AUTOCLEAR;
    if (ioctl(device_.get(), LOOP_CONFIGURE, &config) != 0) path_.clear();
  }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
  FileDescriptor device_;
};

class DiskVolume : private LoopDevice, public kvstore::testing::Volume {
 public:
  explicit DiskVolume(uint64_t size_bytes)
      : LoopDevice(size_bytes), Volume("ext4", {{"source", LoopDevice::path()}}) {
    // The root of a new file system may be read by all users.
    if (valid()) chmod(Volume::path().c_str(), 0700);
  }
  using Volume::path;
};

}  // namespace pqcached::testing

#endif  // PQCACHED_TESTS_FAULT_ENVIRONMENT_DISK_VOLUME_H_

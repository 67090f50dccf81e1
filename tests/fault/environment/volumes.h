// DiskVolume: a small disk with ext4, in an image. HugeVolume: a hugetlbfs, with its own pages.
#ifndef PQCACHED_TESTS_FAULT_ENVIRONMENT_VOLUMES_H_
#define PQCACHED_TESTS_FAULT_ENVIRONMENT_VOLUMES_H_

#include <fcntl.h>
#include <linux/loop.h>
#include <sys/ioctl.h>

#include <cstdint>
#include <fstream>
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

// Adds huge pages to those of the machine, as far as it has them.
class HugePages {
 public:
  explicit HugePages(uint64_t count) : before_(Count()) {
    std::ofstream(kCount) << before_ + count;
    added_ = Count() - before_;
  }
  ~HugePages() { std::ofstream(kCount) << before_; }
  HugePages(const HugePages&) = delete;
  HugePages& operator=(const HugePages&) = delete;

  uint64_t added() const { return added_; }

 private:
  static constexpr char kCount[] = "/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages";

  static uint64_t Count() {
    uint64_t count = 0;
    std::ifstream(kCount) >> count;
    return count;
  }

  const uint64_t before_;
  uint64_t added_ = 0;
};

class HugeVolume : private HugePages, public kvstore::testing::Volume {
 public:
  static constexpr uint64_t kPageBytes = uint64_t{2} << 20;

  explicit HugeVolume(uint64_t pages)
      : HugePages(pages),
        Volume(
            "hugetlbfs",
            {{"pagesize", "2M"}, {"size", std::to_string(added() * kPageBytes)}, {"mode", "0700"}},
            kPageBytes),
        complete_(valid() && added() == pages) {}

  bool complete() const { return complete_; }

 private:
  const bool complete_;
};

}  // namespace pqcached::testing

#endif  // PQCACHED_TESTS_FAULT_ENVIRONMENT_VOLUMES_H_

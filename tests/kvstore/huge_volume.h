// HugeVolume: an empty hugetlbfs without a place in the tree, with pages of its own.
#ifndef PQCACHED_TESTS_KVSTORE_HUGE_VOLUME_H_
#define PQCACHED_TESTS_KVSTORE_HUGE_VOLUME_H_

#include <cstdint>
#include <fstream>
#include <string>

#include "tests/kvstore/small_volume.h"

namespace pqcached::kvstore::testing {

// Adds huge pages to those of the machine, as far as it has them.
class HugePages {
 public:
  explicit HugePages(uint64_t count) {
    const uint64_t before = Count();
    std::ofstream(kCount) << before + count;
    added_ = Count() - before;
  }
  ~HugePages() { std::ofstream(kCount) << Count() - added_; }
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

  uint64_t added_ = 0;
};

class HugeVolume : private HugePages, public Volume {
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

}  // namespace pqcached::kvstore::testing

#endif  // PQCACHED_TESTS_KVSTORE_HUGE_VOLUME_H_

// MemoryLimits: how much more of the machine's memory this process may use.
//
// The limit is the minimum of the memory that the machine has available and of the memory that is
// left in each control group of the process and in all of their ancestors. Version 2 has memory.max
// (beyond it the process is killed) and memory.high (beyond it the process is slowed down and its
// memory reclaimed), version 1 has memory.limit_in_bytes. Both versions limit huge pages of
// hugetlbfs separately.
//
// Thread-safe: no state is kept between calls.
#ifndef PQCACHED_KVSTORE_LIMITS_MEMORY_LIMITS_H_
#define PQCACHED_KVSTORE_LIMITS_MEMORY_LIMITS_H_

#include <cstddef>
#include <limits>
#include <map>
#include <string>

namespace pqcached::kvstore {

inline constexpr size_t kUnlimitedBytes = std::numeric_limits<size_t>::max();

struct MemoryLimits {
  // Minimum of the machine's available memory and of the memory that each control group has left
  // below its hard and its high limit. Inactive file pages count as free, because the kernel
  // reclaims them first.
  size_t available_bytes = kUnlimitedBytes;
  // Largest excess of a control group's memory use over its lower limit: normally the high limit,
  // the hard limit in version 1.
  size_t excess_bytes = 0;
  // File that determines available_bytes; empty if no limit is known.
  std::string source;
  // Minimum of the machine's memory and of all limits of the control groups: more can never be had.
  size_t total_bytes = kUnlimitedBytes;
  std::string total_source;  // file that determines it
  // Available bytes in hugetlbfs pages, by page size in the kernel's spelling ("2MB"). A size
  // without a limit has no entry.
  std::map<std::string, size_t> hugetlb_available_bytes;
  // Returns the available bytes in pages of this size; kUnlimitedBytes if there is no limit.
  size_t HugetlbAvailableBytes(size_t page_bytes) const;
};

// Reads /proc/meminfo, /proc/self/cgroup and /sys/fs/cgroup under `root`. Missing or malformed
// files impose no limit.
MemoryLimits ReadMemoryLimits(const std::string& root = "");

// Returns available_bytes of ReadMemoryLimits.
size_t AvailableMemoryBytes();

}  // namespace pqcached::kvstore

#endif  // PQCACHED_KVSTORE_LIMITS_MEMORY_LIMITS_H_

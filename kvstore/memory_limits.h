// MemoryLimits: what this process may still take of the machine's memory.
//
// The machine says what it has available; control groups say what they leave, each of those that the
// process is in and all of their ancestors. Version 2 has memory.max (beyond it the process is killed)
// and memory.high (beyond it the process is slowed down and its memory reclaimed), version 1
// memory.limit_in_bytes; both limit huge pages of hugetlbfs apart.
//
// Thread-safe: nothing is kept between calls.
#ifndef PQCACHED_KVSTORE_MEMORY_LIMITS_H_
#define PQCACHED_KVSTORE_MEMORY_LIMITS_H_

#include <cstddef>
#include <limits>
#include <map>
#include <string>

namespace pqcached::kvstore {

inline constexpr size_t kUnlimitedBytes = std::numeric_limits<size_t>::max();

struct MemoryLimits {
  // The least of what the machine has available and what each control group leaves below its hard and
  // its high limit. File pages that nobody uses count as free: the kernel takes them back first.
  size_t available_bytes = kUnlimitedBytes;
  // By how much the use of a control group exceeds its high limit (version 1: its hard limit), at most.
  size_t excess_bytes = 0;
  // The file that decides over available_bytes; empty when nothing is known.
  std::string source;
  // Of pages of hugetlbfs, by size as the kernel writes it ("2MB"); a size without limit is not there.
  std::map<std::string, size_t> hugetlb_available_bytes;
  // Of pages of this size: kUnlimitedBytes without limit.
  size_t HugetlbAvailableBytes(size_t page_bytes) const;
};

// Reads /proc/meminfo, /proc/self/cgroup and /sys/fs/cgroup under `root`. What is missing or makes no
// sense limits nothing.
MemoryLimits ReadMemoryLimits(const std::string& root = "");

// Of ReadMemoryLimits: bytes that this process may still take.
size_t AvailableMemoryBytes();

}  // namespace pqcached::kvstore

#endif  // PQCACHED_KVSTORE_MEMORY_LIMITS_H_

// What a test and the allocation shim in its daemon share: a file that both map.
#ifndef PQCACHED_TESTS_FAULT_ENVIRONMENT_ALLOCATION_SHIM_H_
#define PQCACHED_TESTS_FAULT_ENVIRONMENT_ALLOCATION_SHIM_H_

#include <atomic>
#include <cstdint>

namespace pqcached::testing {

inline constexpr char kAllocationShimVariable[] = "PQCACHED_TEST_ALLOCATIONS";  // names the file

// All zero at first: every allocation succeeds.
struct ShimmedAllocations {
  enum Fails : uint32_t { kNone, kOne, kAllLater };

  std::atomic<Fails> fails;
  std::atomic<int64_t> left;  // allocations that succeed before one or all fail
  std::atomic<uint64_t> failed;
};

}  // namespace pqcached::testing

#endif  // PQCACHED_TESTS_FAULT_ENVIRONMENT_ALLOCATION_SHIM_H_

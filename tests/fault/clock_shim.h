// What a test and the clock shim in its daemon share: a file that both map.
#ifndef PQCACHED_TESTS_FAULT_CLOCK_SHIM_H_
#define PQCACHED_TESTS_FAULT_CLOCK_SHIM_H_

#include <array>
#include <atomic>
#include <cstdint>

namespace pqcached::testing {

inline constexpr char kClockShimVariable[] = "PQCACHED_TEST_CLOCK";  // names the file

// All zero at first.
struct ShimmedClock {
  std::atomic<int64_t> offset_ns;  // of the wall clock; the test changes it at any time
  std::atomic<uint32_t> process_count;
  std::array<std::atomic<int32_t>, 16> processes;  // that have the shim
};

}  // namespace pqcached::testing

#endif  // PQCACHED_TESTS_FAULT_CLOCK_SHIM_H_

// Crash points: the implementation of kvstore/memory/durable_store.h in the tests. It counts the stores into memory
// that outlives the process, and kills the process before the n-th.
//
// Thread-safe. A process is armed once.
#ifndef PQCACHED_TESTS_FAULT_CRASH_CRASH_POINTS_H_
#define PQCACHED_TESTS_FAULT_CRASH_CRASH_POINTS_H_

#include <atomic>
#include <cstdint>

namespace pqcached::kvstore::testing {

struct CrashPlan {
  uint64_t point = 0;  // the process is killed before this store, counted from 1; 0 = never
  // Before the kill, the thread that has reached the point waits until the other threads have made this number of
  // stores, or until a few milliseconds have passed: another engine then works between two stores of this one.
  uint64_t stores_of_others = 0;
};

// Starts to count. `reached`: number of stores so far, in memory that outlives the process.
void ArmCrashPoints(const CrashPlan& plan, std::atomic<uint64_t>& reached);
// Stops to count; no store kills the process any more.
void DisarmCrashPoints();

}  // namespace pqcached::kvstore::testing

#endif  // PQCACHED_TESTS_FAULT_CRASH_CRASH_POINTS_H_

// Stores into memory that outlives the process: record tables, roots, and pools with a keeper.
//
// The process may be killed between any two instructions. Stores that have been executed remain.
// The compiler may reorder stores that no fence separates, so each store whose place in the order
// matters is made by a function of this file.
//
// PQC_CRASH_POINT() marks the place before a store, or before stores whose order does not matter.
// It is empty except in the library of tests/fault/crash, where it counts the stores and can kill
// the process. Stores without order are then held back until the next fence, as a compiler might
// do.
#ifndef PQCACHED_KVSTORE_MEMORY_DURABLE_STORE_H_
#define PQCACHED_KVSTORE_MEMORY_DURABLE_STORE_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

#ifdef PQCACHED_CRASH_POINTS
#include <functional>
#define PQC_CRASH_POINT() ::pqcached::kvstore::ReachCrashPoint()
#else
#define PQC_CRASH_POINT() static_cast<void>(0)
#endif

namespace pqcached::kvstore {

#ifdef PQCACHED_CRASH_POINTS
// Implemented by the test program. ReachCrashPoint may kill the process. HoldBack runs `store` at
// the thread's next RunHeldBack.
void ReachCrashPoint();
void HoldBack(std::function<void()> store);
void RunHeldBack();
#endif

// Keeps all stores of this thread before the call ahead of all stores after it.
inline void DurableFence() {
#ifdef PQCACHED_CRASH_POINTS
  RunHeldBack();
#endif
  std::atomic_signal_fence(std::memory_order_seq_cst);
}

// Stores the word; without order until the next fence.
inline void StoreUnordered(std::atomic<uint64_t>& word, uint64_t value) {
  PQC_CRASH_POINT();
#ifdef PQCACHED_CRASH_POINTS
  HoldBack([&word, value] { word.store(value, std::memory_order_relaxed); });
#else
  word.store(value, std::memory_order_relaxed);
#endif
}

// Stores the word after all stores of this thread before the call.
inline void StoreInOrder(std::atomic<uint64_t>& word, uint64_t value) {
#ifdef PQCACHED_CRASH_POINTS
  RunHeldBack();
#endif
  PQC_CRASH_POINT();
  word.store(value, std::memory_order_release);
}

// Fills the bytes; without order until the next fence.
inline void FillUnordered(std::span<std::byte> bytes, uint8_t value) {
  PQC_CRASH_POINT();
#ifdef PQCACHED_CRASH_POINTS
  HoldBack([bytes, value] { std::memset(bytes.data(), value, bytes.size()); });
#else
  std::memset(bytes.data(), value, bytes.size());
#endif
}

}  // namespace pqcached::kvstore

#endif  // PQCACHED_KVSTORE_MEMORY_DURABLE_STORE_H_

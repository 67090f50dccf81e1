// Heat: the usage of a segment, the input of an eviction policy (EvictionPolicy).
//
// Thread-safe: the words are independent atomics without an order among them.
#ifndef PQCACHED_KVSTORE_SEQUENCE_HEAT_H_
#define PQCACHED_KVSTORE_SEQUENCE_HEAT_H_

#include <atomic>
#include <cstdint>

#include "kvstore/values.h"

namespace pqcached::kvstore {

struct SegmentUsage {
  std::atomic<uint64_t> last_use = 0;  // tick of UsageClock
  std::atomic<uint32_t> hits = 0;
  std::atomic<double> worth = 0;
};

// Logical clock of one cache. It advances with each use.
class UsageClock {
 public:
  // Advances the clock and returns the new tick.
  uint64_t Tick() { return uses_.fetch_add(1, std::memory_order_relaxed) + 1; }

  // Records a use at `tick`. `hit`: another request reused the same tokens.
  void Use(uint64_t tick, bool hit, SegmentUsage& heat) const {
    const uint32_t hits =
        hit ? heat.hits.fetch_add(1, std::memory_order_relaxed) + 1 : heat.hits.load();
    heat.last_use.store(tick, std::memory_order_relaxed);
    heat.worth.store(age_.load(std::memory_order_relaxed) + 1 + hits, std::memory_order_relaxed);
  }

  // Returns the eviction score; the lowest is evicted first.
  static double Score(EvictionPolicy policy, const SegmentUsage& heat) {
    if (policy == EvictionPolicy::kReuse) return heat.worth.load(std::memory_order_relaxed);
    return static_cast<double>(heat.last_use.load(std::memory_order_relaxed));
  }

  // Records that a segment of this worth was evicted.
  void OnEvict(double worth) {
    double age = age_.load(std::memory_order_relaxed);
    while (age < worth && !age_.compare_exchange_weak(age, worth, std::memory_order_relaxed)) {
    }
  }

 private:
  std::atomic<uint64_t> uses_ = 0;
  std::atomic<double> age_ = 0;
};

}  // namespace pqcached::kvstore

#endif  // PQCACHED_KVSTORE_SEQUENCE_HEAT_H_

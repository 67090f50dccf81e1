// Heat: how a segment was used, which is what a policy of eviction looks at.
//
// kLru     the segment that nobody has used for the longest time is the first to go
// kReuse   each hit makes a segment worth one more; what is evicted raises the worth of all that is
//          used later (least frequently used, with dynamic aging). So what came once goes before what
//          comes again and again, however recent it is, and past fame fades
//
// Thread-safe; words of their own, no order among them is promised.
#ifndef PQCACHED_KVSTORE_HEAT_H_
#define PQCACHED_KVSTORE_HEAT_H_

#include <atomic>
#include <cstdint>

namespace pqcached::kvstore {

enum class EvictionPolicy : uint8_t { kLru = 0, kReuse = 1 };

struct Heat {
  std::atomic<uint64_t> last_use = 0;  // by HeatClock
  std::atomic<uint32_t> hits = 0;
  std::atomic<double> worth = 0;
};

// The time of one cache.
class HeatClock {
 public:
  // The next moment.
  uint64_t Tick() { return uses_.fetch_add(1, std::memory_order_relaxed) + 1; }

  // A use at `tick`; `hit`: another request came for the same tokens.
  void Use(uint64_t tick, bool hit, Heat& heat) const {
    const uint32_t hits =
        hit ? heat.hits.fetch_add(1, std::memory_order_relaxed) + 1 : heat.hits.load();
    heat.last_use.store(tick, std::memory_order_relaxed);
    heat.worth.store(age_.load(std::memory_order_relaxed) + 1 + hits, std::memory_order_relaxed);
  }

  // The lower, the sooner it goes.
  static double Score(EvictionPolicy policy, const Heat& heat) {
    if (policy == EvictionPolicy::kReuse) return heat.worth.load(std::memory_order_relaxed);
    return static_cast<double>(heat.last_use.load(std::memory_order_relaxed));
  }

  // What had this worth was evicted.
  void Evicted(double worth) {
    double age = age_.load(std::memory_order_relaxed);
    while (age < worth && !age_.compare_exchange_weak(age, worth, std::memory_order_relaxed)) {
    }
  }

 private:
  std::atomic<uint64_t> uses_ = 0;
  std::atomic<double> age_ = 0;
};

}  // namespace pqcached::kvstore

#endif  // PQCACHED_KVSTORE_HEAT_H_

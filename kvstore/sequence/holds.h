// Holds: protects a sequence from eviction, and records the time of its last use.
//
// Leases, writers and builds hold a sequence. A pin keeps it until a given time, even past the end
// of the process (sequence_record.h). The evictor claims a sequence that has no holders; after
// that, no caller can hold it any more. To evict several sequences together, the evictor first
// reserves each of them, then settles all. A caller that wants to hold or pin one of them
// concurrently waits for the decision, so that no caller is notified of an eviction that does not
// happen.
//
// Thread-safe, without locks.
#ifndef PQCACHED_KVSTORE_SEQUENCE_HOLDS_H_
#define PQCACHED_KVSTORE_SEQUENCE_HOLDS_H_

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <ctime>
#include <thread>

#include "absl/time/time.h"
#include "kvstore/values.h"

namespace pqcached::kvstore {

// Returns the nanoseconds of a clock that is never adjusted.
inline int64_t SteadyNanos() {
  return std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Returns the nanoseconds since the machine booted, suspended time included. Values keep their
// meaning in the next process.
inline int64_t BootNanos() {
  timespec now = {};
  clock_gettime(CLOCK_BOOTTIME, &now);
  return now.tv_sec * 1'000'000'000 + now.tv_nsec;
}

class Holds {
 public:
  // Acquires a hold. Returns false when the sequence was claimed. Each successful call is followed
  // by one Release.
  [[nodiscard]] bool Acquire() {
    for (;;) {
      int64_t count = DecidedCount();
      if (count == kClaimed) return false;
      if (count_.compare_exchange_weak(count, count + 1)) return true;
    }
  }
  void Release() {
    Touch();
    count_.fetch_sub(1, std::memory_order_acq_rel);
  }
  // Reserves the sequence for the evictor. Returns true when it has no holders and no pin. The
  // evictor then calls Decide once, soon, because other callers wait until it does.
  [[nodiscard]] bool Reserve() {
    int64_t nobody = 0;
    if (!count_.compare_exchange_strong(nobody, kReserved)) return false;
    if (!pinned()) return true;
    Decide(/*claimed=*/false);
    return false;
  }
  void Decide(bool claimed) { count_.store(claimed ? kClaimed : 0); }
  // Reserves and settles a sequence that is evicted alone. At most once.
  [[nodiscard]] bool Claim() {
    const bool reserved = Reserve();
    if (reserved) Decide(/*claimed=*/true);
    return reserved;
  }
  bool claimed() const { return DecidedCount() == kClaimed; }
  bool held() const { return count_.load(std::memory_order_acquire) > 0; }

  // Pins the sequence until a time of BootNanos; zero removes the pin. The time is limited to
  // [0, kMaxPin from now], even when a record holds another one.
  void PinUntil(int64_t boot_nanos) {
    const int64_t most = BootNanos() + absl::ToInt64Nanoseconds(kMaxPin);
    pinned_until_.store(std::clamp<int64_t>(boot_nanos, 0, most));
  }
  int64_t pinned_until() const { return pinned_until_.load(); }
  // Returns the remaining time of the pin; zero when there is none.
  absl::Duration pin_left() const {
    return std::max(absl::ZeroDuration(), absl::Nanoseconds(pinned_until_.load() - BootNanos()));
  }
  bool pinned() const { return BootNanos() < pinned_until_.load(); }

  void Touch() { last_use_.store(SteadyNanos(), std::memory_order_relaxed); }
  absl::Duration idle() const {
    return absl::Nanoseconds(SteadyNanos() - last_use_.load(std::memory_order_relaxed));
  }

 private:
  static constexpr int64_t kClaimed = -1;
  static constexpr int64_t kReserved = -2;

  // Returns the count once no evictor is about to decide; a decision takes the evictor only a few
  // loads and stores.
  int64_t DecidedCount() const {
    for (;;) {
      const int64_t count = count_.load();
      if (count != kReserved) return count;
      std::this_thread::yield();
    }
  }

  std::atomic<int64_t> count_ = 0;
  std::atomic<int64_t> pinned_until_ = 0;          // time of BootNanos
  std::atomic<int64_t> last_use_ = SteadyNanos();  // time of SteadyNanos
};

// Holds one sequence for the lifetime of this object.
template <typename Owner>  // a Sequence
class Hold {
 public:
  // The caller checks `taken` before any other use of the sequence.
  explicit Hold(Owner& owner) : owner_(owner), taken_(owner.holds().Acquire()) {}
  ~Hold() {
    if (taken_) owner_.holds().Release();
  }
  Hold(const Hold&) = delete;
  Hold& operator=(const Hold&) = delete;

  bool taken() const { return taken_; }

 private:
  Owner& owner_;
  const bool taken_;
};

}  // namespace pqcached::kvstore

#endif  // PQCACHED_KVSTORE_SEQUENCE_HOLDS_H_

// Holds: what keeps a sequence from being evicted, and since when nobody has used it.
//
// Leases, writers and builds hold a sequence; a pin keeps it until its time has come, also beyond the end
// of the process (sequence_record.h). The evictor claims a sequence that nobody holds: from then on
// nobody can hold it any more. Of several that go together it first reserves each one, then settles all:
// who wants to hold or pin one of them meanwhile waits for what comes out, so that nobody is told of an
// eviction that does not happen.
//
// Thread-safe, without locks.
#ifndef PQCACHED_KVSTORE_HOLDS_H_
#define PQCACHED_KVSTORE_HOLDS_H_

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <ctime>
#include <thread>

#include "absl/time/time.h"

namespace pqcached::kvstore {

// Of a clock that nobody sets.
inline int64_t SteadyNanos() {
  return std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Since the machine booted, suspended or not: means the same to the next process.
inline int64_t BootNanos() {
  timespec now = {};
  clock_gettime(CLOCK_BOOTTIME, &now);
  return now.tv_sec * 1'000'000'000 + now.tv_nsec;
}

class Holds {
 public:
  static constexpr absl::Duration kLongestPin = absl::Hours(24 * 30);

  // False when it was claimed. Each successful call is followed by one Release.
  [[nodiscard]] bool Take() {
    for (;;) {
      int64_t count = Settled();
      if (count == kClaimed) return false;
      if (count_.compare_exchange_weak(count, count + 1)) return true;
    }
  }
  void Release() {
    Touch();
    count_.fetch_sub(1, std::memory_order_acq_rel);
  }
  // Of the evictor: true when nobody holds it and no pin keeps it; followed by one Settle, soon: until then
  // others wait.
  [[nodiscard]] bool Reserve() {
    int64_t nobody = 0;
    if (!count_.compare_exchange_strong(nobody, kReserved)) return false;
    if (!pinned()) return true;
    Settle(/*claimed=*/false);
    return false;
  }
  void Settle(bool claimed) { count_.store(claimed ? kClaimed : 0); }
  // Both at once, of one that goes alone. Once.
  [[nodiscard]] bool Claim() {
    const bool reserved = Reserve();
    if (reserved) Settle(/*claimed=*/true);
    return reserved;
  }
  bool claimed() const { return Settled() == kClaimed; }
  bool held() const { return count_.load(std::memory_order_acquire) > 0; }

  // Of BootNanos; zero: not any more. Not for longer than kLongestPin from now, whatever a record says.
  void PinUntil(int64_t boot_nanos) {
    const int64_t most = BootNanos() + absl::ToInt64Nanoseconds(kLongestPin);
    pinned_until_.store(std::min(boot_nanos, most));
  }
  int64_t pinned_until() const { return pinned_until_.load(); }
  // Zero when it is not pinned.
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

  // The count when no evictor is about to decide, which takes it some loads and stores.
  int64_t Settled() const {
    for (;;) {
      const int64_t count = count_.load();
      if (count != kReserved) return count;
      std::this_thread::yield();
    }
  }

  std::atomic<int64_t> count_ = 0;
  std::atomic<int64_t> pinned_until_ = 0;          // of BootNanos
  std::atomic<int64_t> last_use_ = SteadyNanos();  // of that
};

// Holds one sequence while it lives.
template <typename Owner>  // a Sequence
class Hold {
 public:
  // Check `taken` before anything else.
  explicit Hold(Owner& owner) : owner_(owner), taken_(owner.holds().Take()) {}
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

#endif  // PQCACHED_KVSTORE_HOLDS_H_

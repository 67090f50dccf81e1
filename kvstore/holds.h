// Holds: what keeps a sequence from being evicted, and since when nobody has used it.
//
// Leases, writers and builds hold a sequence; a pin keeps it until its time has come, also beyond the end
// of the process (sequence_record.h). The evictor claims a sequence that nobody holds: from then on
// nobody can hold it any more.
//
// Thread-safe, without locks.
#ifndef PQCACHED_KVSTORE_HOLDS_H_
#define PQCACHED_KVSTORE_HOLDS_H_

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <ctime>

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
    int64_t count = count_.load(std::memory_order_acquire);
    while (count != kClaimed) {
      if (count_.compare_exchange_weak(count, count + 1, std::memory_order_acq_rel)) return true;
    }
    return false;
  }
  void Release() {
    Touch();
    count_.fetch_sub(1, std::memory_order_acq_rel);
  }
  // Of the evictor: true when nobody holds it and no pin keeps it. Once.
  [[nodiscard]] bool Claim() {
    int64_t nobody = 0;
    if (!count_.compare_exchange_strong(nobody, kClaimed, std::memory_order_acq_rel)) return false;
    if (!pinned()) return true;
    count_.store(0, std::memory_order_release);
    return false;
  }
  bool claimed() const { return count_.load(std::memory_order_acquire) == kClaimed; }
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

// Holds: what keeps a sequence from being evicted, and since when nobody has used it.
//
// Leases, writers and builds hold a sequence; a pin keeps it until its time has come. The evictor claims
// a sequence that nobody holds: from then on nobody can hold it any more.
//
// Thread-safe, without locks.
#ifndef PQCACHED_KVSTORE_HOLDS_H_
#define PQCACHED_KVSTORE_HOLDS_H_

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>

#include "absl/time/time.h"

namespace pqcached::kvstore {

// Of a clock that nobody sets.
inline int64_t SteadyNanos() {
  return std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count();
}

class Holds {
 public:
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

  // Zero: not any more.
  void Pin(absl::Duration ttl) {
    // At most as long as nanoseconds can be counted.
    const absl::Duration most = absl::Hours(24 * 365);
    pinned_until_.store(SteadyNanos() + absl::ToInt64Nanoseconds(std::min(ttl, most)));
  }
  // Zero when it is not pinned.
  absl::Duration pin_left() const {
    return std::max(absl::ZeroDuration(), absl::Nanoseconds(pinned_until_.load() - SteadyNanos()));
  }
  bool pinned() const { return SteadyNanos() < pinned_until_.load(); }

  void Touch() { last_use_.store(SteadyNanos(), std::memory_order_relaxed); }
  absl::Duration idle() const {
    return absl::Nanoseconds(SteadyNanos() - last_use_.load(std::memory_order_relaxed));
  }

 private:
  static constexpr int64_t kClaimed = -1;

  std::atomic<int64_t> count_ = 0;
  std::atomic<int64_t> pinned_until_ = 0;  // as last_use_, of SteadyNanos
  std::atomic<int64_t> last_use_ = SteadyNanos();
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

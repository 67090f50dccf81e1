// SteadyTime: a point in time on a clock that is never adjusted.
//
// Wall time jumps: an administrator, NTP or a resumed virtual machine moves it by hours. Deadlines,
// waits and times to live are therefore SteadyTimes. The corresponding types of absl are not used
// (tests/tidy checks this), because their waits end at a wall time even when they are given a
// duration. The clock is that of std::chrono::steady_clock: it stops while the machine is
// suspended, and its values have no meaning on another machine or after a reboot.
//
// Arithmetic saturates like that of absl::Duration: the infinite future plus or minus a finite
// duration remains the infinite future.
#ifndef PQCACHED_KVSTORE_CLOCK_H_
#define PQCACHED_KVSTORE_CLOCK_H_

#include <chrono>

#include "absl/time/time.h"

namespace pqcached::kvstore {

class SteadyTime {
 public:
  // Constructs a time in the distant past (the epoch of the clock).
  constexpr SteadyTime() = default;
  explicit SteadyTime(std::chrono::steady_clock::time_point time)
      : since_boot_(absl::FromChrono(time.time_since_epoch())) {}

  static SteadyTime Now() { return SteadyTime(std::chrono::steady_clock::now()); }
  static constexpr SteadyTime InfiniteFuture() { return SteadyTime(absl::InfiniteDuration()); }
  static constexpr SteadyTime InfinitePast() { return SteadyTime(-absl::InfiniteDuration()); }

  // Converts to std::chrono; the infinite future becomes the largest representable time.
  std::chrono::steady_clock::time_point ToChrono() const {
    return std::chrono::steady_clock::time_point(absl::ToChronoNanoseconds(since_boot_));
  }

  SteadyTime& operator+=(absl::Duration duration) {
    since_boot_ += duration;
    return *this;
  }
  friend SteadyTime operator+(SteadyTime time, absl::Duration duration) { return time += duration; }
  friend SteadyTime operator-(SteadyTime time, absl::Duration duration) {
    return time += -duration;
  }
  friend absl::Duration operator-(SteadyTime end, SteadyTime begin) {
    return end.since_boot_ - begin.since_boot_;
  }
  friend constexpr bool operator==(SteadyTime a, SteadyTime b) {
    return a.since_boot_ == b.since_boot_;
  }
  friend constexpr bool operator<(SteadyTime a, SteadyTime b) {
    return a.since_boot_ < b.since_boot_;
  }
  friend constexpr bool operator>(SteadyTime a, SteadyTime b) { return b < a; }
  friend constexpr bool operator<=(SteadyTime a, SteadyTime b) { return !(b < a); }
  friend constexpr bool operator>=(SteadyTime a, SteadyTime b) { return !(a < b); }

 private:
  explicit constexpr SteadyTime(absl::Duration since_boot) : since_boot_(since_boot) {}

  absl::Duration since_boot_;
};

}  // namespace pqcached::kvstore

#endif  // PQCACHED_KVSTORE_CLOCK_H_

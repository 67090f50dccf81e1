// A wall clock that a test can set: a library for LD_PRELOAD.
//
// Setting the real one needs rights, and disturbs everybody else. So what asks for the wall time gets it
// with an offset, and what sleeps until a wall time (futexes with FUTEX_CLOCK_REALTIME: the timed waits of
// absl, and so gRPC's) sleeps until that of the shim, and looks at it again and again: a jump ends
// such a sleep, or makes it longer, as one of the kernel's clock does. glibc's own waits until a wall
// time do not pass through here; nothing in the daemon uses them.
#include "clock_shim.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdarg>
#include <cstdlib>
#include <ctime>

namespace {

using pqcached::testing::ShimmedClock;

constexpr int64_t kNanosPerSecond = 1'000'000'000;
constexpr int64_t kSliceNanos = 5'000'000;  // between looks at the clock, in a sleep

template <typename Function>
Function* Next(const char* name) {
  return reinterpret_cast<Function*>(dlsym(RTLD_NEXT, name));
}

int NextClock(clockid_t clock, timespec* time) {
  static auto* const next = Next<int(clockid_t, timespec*)>("clock_gettime");
  return next(clock, time);
}

// The argument of a system call that has six.
using Words = long[6];

long NextSyscall(long number, const Words& words) {
  static auto* const next = Next<long(long, ...)>("syscall");
  return next(number, words[0], words[1], words[2], words[3], words[4], words[5]);
}

// Null: the test did not name a file.
ShimmedClock* Map() {
  const char* path = getenv(pqcached::testing::kClockShimVariable);
  const int file = path == nullptr ? -1 : open(path, O_RDWR | O_CLOEXEC);
  if (file < 0) return nullptr;
  void* const page =
      mmap(nullptr, sizeof(ShimmedClock), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  return page == MAP_FAILED ? nullptr : static_cast<ShimmedClock*>(page);
}

int64_t OffsetNanos() {
  static ShimmedClock* const clock = Map();
  return clock == nullptr ? 0 : clock->offset_ns.load();
}

int64_t NanosOf(const timespec& time) { return time.tv_sec * kNanosPerSecond + time.tv_nsec; }

timespec TimespecOf(int64_t nanos) {
  return {.tv_sec = nanos / kNanosPerSecond, .tv_nsec = nanos % kNanosPerSecond};
}

int64_t WallNanos() {
  timespec now = {};
  NextClock(CLOCK_REALTIME, &now);
  return NanosOf(now) + OffsetNanos();
}

// FUTEX_WAIT_BITSET until a wall time.
long WaitUntilWallTime(const Words& words) {
  const int64_t until = NanosOf(*reinterpret_cast<const timespec*>(words[3]));
  for (;;) {
    const int64_t left = until - WallNanos();
    if (left <= 0) {
      errno = ETIMEDOUT;
      return -1;
    }
    timespec now = {};
    NextClock(CLOCK_MONOTONIC, &now);
    const timespec slice = TimespecOf(NanosOf(now) + std::min(left, kSliceNanos));
    const Words sliced = {words[0], words[1] & ~FUTEX_CLOCK_REALTIME,
                          words[2], reinterpret_cast<long>(&slice),
                          words[4], words[5]};
    const long result = NextSyscall(SYS_futex, sliced);
    if (result == 0 || errno != ETIMEDOUT) return result;
  }
}

__attribute__((constructor)) void Announce() {
  if (ShimmedClock* const clock = Map(); clock != nullptr) {
    const uint32_t place = clock->process_count.fetch_add(1);
    if (place < clock->processes.size()) clock->processes[place] = getpid();
  }
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

int clock_gettime(clockid_t clock, timespec* time) noexcept {
  const int result = NextClock(clock, time);
  if (result == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) {
    *time = TimespecOf(NanosOf(*time) + OffsetNanos());
  }
  return result;
}

int gettimeofday(timeval* time, void*) noexcept {
  const int64_t now = WallNanos();
  time->tv_sec = now / kNanosPerSecond;
  time->tv_usec = now % kNanosPerSecond / 1000;
  return 0;
}

time_t time(time_t* result) noexcept {
  const time_t now = WallNanos() / kNanosPerSecond;
  if (result != nullptr) *result = now;
  return now;
}

long syscall(long number, ...) noexcept {
  Words words;
  va_list arguments;
  va_start(arguments, number);
  for (long& word : words) word = va_arg(arguments, long);
  va_end(arguments);
  if (number == SYS_futex && (words[1] & FUTEX_CLOCK_REALTIME) != 0 && words[3] != 0 &&
      (words[1] & FUTEX_CMD_MASK) == FUTEX_WAIT_BITSET) {
    return WaitUntilWallTime(words);
  }
  return NextSyscall(number, words);
}
}
#pragma GCC visibility pop

// How long the calling thread's call of the C ABI may still wait, over all that it waits for.
//
// A call's time begins with its first wait, so that calls that never wait do not look at the clock.
// Outside of calls, on threads of the client's own, every wait has the whole time.
#ifndef PQCACHED_CLIENT_DEADLINE_H_
#define PQCACHED_CLIENT_DEADLINE_H_

#include <chrono>
#include <cstdint>

namespace pqcached::client {

using DeadlineClock = std::chrono::steady_clock;

// Frames a call of the C ABI (error.h); one within another changes nothing.
class CallFrame {
 public:
  CallFrame() noexcept;
  ~CallFrame();
  CallFrame(const CallFrame&) = delete;
  CallFrame& operator=(const CallFrame&) = delete;

 private:
  const bool outermost_;
};

// Until when the thread's call may wait: `timeout_ms` after its first wait.
DeadlineClock::time_point CallDeadline(uint32_t timeout_ms) noexcept;
// The same as a duration; 0 when it is over.
uint32_t RemainingMs(uint32_t timeout_ms) noexcept;

// The call has a deadline of its own; it holds if no other does already.
void SetCallDeadline(DeadlineClock::time_point deadline) noexcept;

}  // namespace pqcached::client

#endif  // PQCACHED_CLIENT_DEADLINE_H_

// Deadline of the C ABI call that the calling thread is in, shared by all waits of that call.
//
// A call's time begins with its first wait, so that calls that never wait do not read the clock.
// Outside of a call, on the client's own threads, every wait has the full timeout.
#ifndef PQCACHED_CLIENT_BASE_DEADLINE_H_
#define PQCACHED_CLIENT_BASE_DEADLINE_H_

#include <chrono>
#include <cstdint>

namespace pqcached::client {

using DeadlineClock = std::chrono::steady_clock;

// Marks the thread as inside a call of the C ABI (error.h); a nested frame changes nothing.
class CallFrame {
 public:
  CallFrame() noexcept;
  ~CallFrame();
  CallFrame(const CallFrame&) = delete;
  CallFrame& operator=(const CallFrame&) = delete;

 private:
  const bool outermost_;
};

// Returns whether the thread is inside a call of the C ABI and not one of the client's own.
bool InCall() noexcept;
// Marks the thread as one of the client's own: calls that it makes have deadlines, but no caller
// waits for them.
void MarkOwnThread() noexcept;
bool IsOwnThread() noexcept;

// Returns the time until which the thread's call may wait: `timeout_ms` after its first wait.
DeadlineClock::time_point CallDeadline(uint32_t timeout_ms) noexcept;
// Returns the remaining time of the thread's call in milliseconds; 0 after the deadline.
uint32_t RemainingMs(uint32_t timeout_ms) noexcept;

// Sets the deadline of the thread's call, unless the call has one already.
void SetCallDeadline(DeadlineClock::time_point deadline) noexcept;

}  // namespace pqcached::client

#endif  // PQCACHED_CLIENT_BASE_DEADLINE_H_

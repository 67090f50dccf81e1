#include "client/base/deadline.h"

#include <algorithm>

namespace pqcached::client {
namespace {

struct CallTime {
  bool in_call = false;
  bool is_set = false;
  DeadlineClock::time_point deadline;
};

thread_local CallTime call_time;
thread_local bool own_thread = false;

}  // namespace

CallFrame::CallFrame() noexcept : outermost_(!call_time.in_call) {
  if (!outermost_) return;
  call_time.in_call = true;
  call_time.is_set = false;
}

CallFrame::~CallFrame() {
  if (outermost_) call_time.in_call = false;
}

bool InCall() noexcept { return call_time.in_call && !own_thread; }

void MarkOwnThread() noexcept { own_thread = true; }

bool IsOwnThread() noexcept { return own_thread; }

DeadlineClock::time_point CallDeadline(uint32_t timeout_ms) noexcept {
  if (call_time.in_call && call_time.is_set) return call_time.deadline;
  const auto deadline = DeadlineClock::now() + std::chrono::milliseconds(timeout_ms);
  SetCallDeadline(deadline);
  return deadline;
}

uint32_t RemainingMs(uint32_t timeout_ms) noexcept {
  const auto left =
      std::chrono::ceil<std::chrono::milliseconds>(CallDeadline(timeout_ms) - DeadlineClock::now());
  return static_cast<uint32_t>(std::clamp<int64_t>(left.count(), 0, UINT32_MAX));
}

void SetCallDeadline(DeadlineClock::time_point deadline) noexcept {
  if (!call_time.in_call || call_time.is_set) return;
  call_time.is_set = true;
  call_time.deadline = deadline;
}

}  // namespace pqcached::client

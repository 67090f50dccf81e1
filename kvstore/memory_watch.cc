#include "kvstore/memory_watch.h"

#include <utility>

#include "kvstore/clock.h"

namespace pqcached::kvstore {

MemoryWatch::MemoryWatch(absl::Duration interval, std::function<void()> check)
    : interval_(interval), check_(std::move(check)), thread_([this] { Run(); }) {}

MemoryWatch::~MemoryWatch() {
  {
    const MutexLock lock(&mutex_);
    stop_ = true;
    stopped_.SignalAll();
  }
  thread_.join();
}

void MemoryWatch::Run() {
  for (;;) {
    {
      const MutexLock lock(&mutex_);
      const SteadyTime until = SteadyTime::Now() + interval_;
      while (!stop_ && SteadyTime::Now() < until) stopped_.WaitUntil(&mutex_, until);
      if (stop_) return;
    }
    check_();
  }
}

}  // namespace pqcached::kvstore

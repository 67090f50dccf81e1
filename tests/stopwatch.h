// Stopwatch: how long something takes on a machine that may be busy with others. A thread that sleeps for a
// moment, again and again, knows by how much it wakes late: so long the machine has kept from this
// process (and from its daemon, which is no better off), and that time is not counted.
#ifndef PQCACHED_TESTS_STOPWATCH_H_
#define PQCACHED_TESTS_STOPWATCH_H_

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>

namespace pqcached::testing {

// Thread-safe.
class Stopwatch {
  using Clock = std::chrono::steady_clock;

 public:
  Stopwatch() : wakes_(Clock::now() + kNap), thread_([this] { Run(); }) {}
  ~Stopwatch() {
    {
      const std::lock_guard lock(mutex_);
      stop_ = true;
    }
    stopped_.notify_all();
    thread_.join();
  }
  Stopwatch(const Stopwatch&) = delete;
  Stopwatch& operator=(const Stopwatch&) = delete;

  // Since the stopwatch began.
  std::chrono::nanoseconds Now() const {
    const std::lock_guard lock(mutex_);
    const Clock::time_point now = Clock::now();
    return now - began_ - withheld_ - std::max(Clock::duration::zero(), now - wakes_);
  }

 private:
  static constexpr std::chrono::milliseconds kNap{5};

  void Run() {
    std::unique_lock lock(mutex_);
    while (!stop_) {
      stopped_.wait_until(lock, wakes_);
      const Clock::time_point now = Clock::now();
      withheld_ += std::max(Clock::duration::zero(), now - wakes_);
      wakes_ = now + kNap;
    }
  }

  const Clock::time_point began_ = Clock::now();
  mutable std::mutex mutex_;
  std::condition_variable stopped_;
  bool stop_ = false;
  Clock::time_point wakes_;
  Clock::duration withheld_{};
  std::thread thread_;
};

}  // namespace pqcached::testing

#endif  // PQCACHED_TESTS_STOPWATCH_H_

// Worker runs tasks one at a time on a thread of its own: in the order in which they were queued,
// or at given times of the steady clock.
//
// The thread starts with the first task. A worker that is never used therefore costs no thread.
//
// Thread-safe. Tasks run without any lock of this class, must not throw, and may queue and cancel
// other tasks. A running task delays all others.
#ifndef PQCACHED_KERNELS_BASE_WORKER_H_
#define PQCACHED_KERNELS_BASE_WORKER_H_

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <thread>
#include <utility>
#include <vector>

#include "kernels/base/mutex.h"

namespace pqcached::base {

class Worker {
 public:
  using Clock = std::chrono::steady_clock;
  using Task = std::function<void()>;
  // Identifies a timed task; a default-constructed one identifies none. The number distinguishes
  // tasks of equal times.
  using TimerId = std::pair<Clock::time_point, uint64_t>;

  // `name` is the thread's name in the system's lists (top, gdb), of which Linux keeps 15 bytes.
  explicit Worker(const char* name) : name_(name) {}
  // Calls Stop.
  ~Worker() { Stop(); }
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  // Queues `task`. Tasks in steady state do not allocate, except for what std::function allocates.
  // Throws when memory or a thread cannot be had; then the task is not run. After Stop, the task is
  // dropped.
  void Run(Task task);
  // Runs `task` once, not before `at`. Throws and drops as Run does.
  TimerId RunAt(Clock::time_point at, Task task);
  TimerId RunAfter(Clock::duration delay, Task task) {
    return RunAt(Clock::now() + delay, std::move(task));
  }
  // Removes a timed task that has not started. Does not wait for a task that is running, so a task
  // must own (or share) all that it uses, unless Stop ends the worker first.
  void Cancel(const TimerId& timer);
  // Completes the tasks of Run that are queued, drops timed tasks that have not started, and waits
  // for the thread. REQUIRES: not called by a task.
  void Stop();

 private:
  void StartLocked() PQCACHED_REQUIRES(mutex_);
  void Serve();

  const char* const name_;
  Mutex mutex_;
  CondVar changed_;
  std::vector<Task> queued_ PQCACHED_GUARDED_BY(mutex_);
  std::map<TimerId, Task> timed_ PQCACHED_GUARDED_BY(mutex_);
  uint64_t last_number_ PQCACHED_GUARDED_BY(mutex_) = 0;
  bool stop_ PQCACHED_GUARDED_BY(mutex_) = false;
  std::thread thread_ PQCACHED_GUARDED_BY(mutex_);
};

}  // namespace pqcached::base

#endif  // PQCACHED_KERNELS_BASE_WORKER_H_

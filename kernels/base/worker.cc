#include "kernels/base/worker.h"

#include <pthread.h>

#include <cstdio>

namespace pqcached::base {
namespace {

// Both vectors of tasks get this room when they are first used, so that it does not depend on
// chance which of them grows in a busy moment.
constexpr size_t kExpectedTasks = 64;

}  // namespace

void Worker::StartLocked() {
  if (thread_.joinable()) return;
  thread_ = std::thread([this] { Serve(); });
  char name[16];  // the system refuses longer names
  std::snprintf(name, sizeof(name), "%s", name_);
  pthread_setname_np(thread_.native_handle(), name);
}

void Worker::Run(Task task) {
  {
    const MutexLock lock(&mutex_);
    if (stop_) return;
    StartLocked();
    if (queued_.capacity() < kExpectedTasks) queued_.reserve(kExpectedTasks);
    queued_.push_back(std::move(task));
  }
  changed_.SignalAll();
}

Worker::TimerId Worker::RunAt(Clock::time_point at, Task task) {
  const MutexLock lock(&mutex_);
  if (stop_) return {};
  StartLocked();
  const auto added = timed_.emplace(TimerId(at, ++last_number_), std::move(task)).first;
  if (added == timed_.begin()) changed_.SignalAll();
  return added->first;
}

void Worker::Cancel(const TimerId& timer) {
  Task removed;  // destroyed after the lock is released, with its captures
  const MutexLock lock(&mutex_);
  const auto found = timed_.find(timer);
  if (found == timed_.end()) return;
  removed = std::move(found->second);
  timed_.erase(found);
}

void Worker::Stop() {
  std::map<TimerId, Task> dropped;  // destroyed without the lock, with their captures
  std::thread ended;
  {
    const MutexLock lock(&mutex_);
    stop_ = true;
    dropped.swap(timed_);
    ended.swap(thread_);
  }
  changed_.SignalAll();
  if (ended.joinable()) ended.join();
}

void Worker::Serve() {
  std::vector<Task> taken;  // swapped with queued_, so that both keep their memory
  for (;;) {
    Task due;
    {
      const MutexLock lock(&mutex_);
      while (queued_.empty() && !stop_) {
        if (timed_.empty()) {
          changed_.Wait(&mutex_);
        } else if (const Clock::time_point next = timed_.begin()->first.first;
                   next > Clock::now()) {
          changed_.WaitUntil(&mutex_, next);
        } else {
          break;
        }
      }
      if (queued_.empty() && stop_) return;
      taken.swap(queued_);
      if (!timed_.empty() && timed_.begin()->first.first <= Clock::now()) {
        due = std::move(timed_.begin()->second);
        timed_.erase(timed_.begin());
      }
    }
    if (due) due();
    for (Task& task : taken) {
      task();
      task = nullptr;  // its captures end before the next task runs
    }
    taken.clear();
  }
}

}  // namespace pqcached::base

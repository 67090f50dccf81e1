#include "service/base/executor.h"

#include <optional>

namespace pqcached::service {

using kvstore::MutexLock;
using kvstore::SteadyTime;

Executor::Executor(Options options) : queue_(std::move(options.queue)) {
  threads_.reserve(options.threads + 1);
  for (uint32_t i = 0; i < options.threads; ++i) threads_.emplace_back([this] { Work(); });
  threads_.emplace_back([this] { Expire(); });
}

Executor::~Executor() {
  {
    const MutexLock lock(&mutex_);
    stopping_ = true;
    changed_.SignalAll();
    deadlines_.SignalAll();
  }
  for (std::thread& thread : threads_) thread.join();
}

FairQueue::Answer Executor::TryRun(QueuedTask task) {
  const SteadyTime deadline = task.deadline;
  const MutexLock lock(&mutex_);
  const SteadyTime earliest = queue_.NextDeadline();
  const FairQueue::Answer answer = queue_.Push(std::move(task));
  if (answer != FairQueue::Answer::kTaken) return answer;
  changed_.SignalOne();
  if (deadline < earliest) deadlines_.SignalOne();
  return answer;
}

void Executor::Run(QueuedTask task) {
  const MutexLock lock(&mutex_);
  queue_.PushAlways(std::move(task));
  changed_.SignalOne();
  deadlines_.SignalOne();
}

void Executor::Work() {
  const MutexLock lock(&mutex_);
  while (true) {
    std::optional<QueuedTask> task = queue_.Take();
    if (!task.has_value()) {
      // When it stops, the threads that run tasks start those that may not start yet.
      if (stopping_) return;
      changed_.Wait(&mutex_);
      continue;
    }
    mutex_.Unlock();
    const SteadyTime begun = SteadyTime::Now();
    task->run();
    const absl::Duration elapsed = SteadyTime::Now() - begun;
    task->run = nullptr;  // frees what the task holds, without the lock
    task->expire = nullptr;
    mutex_.Lock();
    queue_.Finish(task->tenant, task->lane, elapsed);
    changed_.SignalOne();  // another task of the tenant, or of the lane, may be startable
  }
}

void Executor::Expire() {
  const MutexLock lock(&mutex_);
  while (!stopping_) {
    const std::vector<QueuedTask> expired = queue_.TakeExpired(SteadyTime::Now());
    if (expired.empty()) {
      deadlines_.WaitUntil(&mutex_, queue_.NextDeadline());
      continue;
    }
    mutex_.Unlock();
    for (const QueuedTask& each : expired) each.expire();
    mutex_.Lock();
  }
}

std::pair<size_t, uint32_t> Executor::CountsOf(const std::string& tenant) const {
  const MutexLock lock(&mutex_);
  return queue_.CountsOf(tenant);
}

}  // namespace pqcached::service

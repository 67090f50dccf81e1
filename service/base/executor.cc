#include "service/base/executor.h"

#include <utility>

namespace pqcached::service {

using kvstore::MutexLock;

Executor::Executor(Options options) : options_(options) {
  threads_.reserve(options_.threads);
  for (uint32_t i = 0; i < options_.threads; ++i) threads_.emplace_back([this] { Work(); });
}

Executor::~Executor() {
  {
    const MutexLock lock(&mutex_);
    stopping_ = true;
    changed_.SignalAll();
  }
  for (std::thread& thread : threads_) thread.join();
}

bool Executor::TryRun(Task task, Lane lane) {
  return Push(std::move(task), lane, /*ignore_limit=*/false);
}

void Executor::Run(Task task) { Push(std::move(task), Lane::kBrief, /*ignore_limit=*/true); }

bool Executor::Push(Task task, Lane lane, bool ignore_limit) {
  {
    const MutexLock lock(&mutex_);
    if (!ignore_limit && brief_.size() + bulk_.size() >= options_.max_pending) return false;
    std::deque<Waiting>& waiting = lane == Lane::kBulk ? bulk_ : brief_;
    waiting.push_back({std::move(task), next_number_++});
  }
  changed_.SignalOne();
  return true;
}

std::optional<Executor::Lane> Executor::Next() const {
  const bool bulk = !bulk_.empty() && bulk_running_ < options_.bulk_threads;
  if (brief_.empty()) return bulk ? std::optional(Lane::kBulk) : std::nullopt;
  return bulk && bulk_.front().number < brief_.front().number ? Lane::kBulk : Lane::kBrief;
}

void Executor::Work() {
  while (true) {
    Task task;
    std::optional<Lane> lane;
    {
      const MutexLock lock(&mutex_);
      while (!HasWork()) changed_.Wait(&mutex_);
      lane = Next();
      if (!lane.has_value()) return;  // the threads that run bulk tasks finish the waiting ones
      std::deque<Waiting>& waiting = *lane == Lane::kBulk ? bulk_ : brief_;
      task = std::move(waiting.front().task);
      waiting.pop_front();
      if (*lane == Lane::kBulk) ++bulk_running_;
    }
    task();
    if (*lane == Lane::kBrief) continue;
    const MutexLock lock(&mutex_);
    --bulk_running_;
    if (!bulk_.empty()) changed_.SignalOne();  // another thread may take it
  }
}

}  // namespace pqcached::service

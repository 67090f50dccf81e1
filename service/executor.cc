#include "service/executor.h"

#include <utility>

namespace pqcached::service {

Executor::Executor(Options options) : options_(options) {
  threads_.reserve(options_.threads);
  for (uint32_t i = 0; i < options_.threads; ++i) threads_.emplace_back([this] { Work(); });
}

Executor::~Executor() {
  {
    absl::MutexLock lock(&mutex_);
    stopping_ = true;
  }
  for (std::thread& thread : threads_) thread.join();
}

bool Executor::TryRun(Task task) { return Push(std::move(task), /*even_past_limit=*/false); }

void Executor::Run(Task task) { Push(std::move(task), /*even_past_limit=*/true); }

bool Executor::Push(Task task, bool even_past_limit) {
  absl::MutexLock lock(&mutex_);
  if (!even_past_limit && tasks_.size() >= options_.max_pending) return false;
  tasks_.push_back(std::move(task));
  return true;
}

void Executor::Work() {
  while (true) {
    Task task;
    {
      absl::MutexLock lock(&mutex_);
      mutex_.Await(absl::Condition(this, &Executor::HasWork));
      if (tasks_.empty()) return;
      task = std::move(tasks_.front());
      tasks_.pop_front();
    }
    task();
  }
}

}  // namespace pqcached::service

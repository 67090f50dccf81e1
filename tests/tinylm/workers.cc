#include "tests/tinylm/workers.h"

#include <algorithm>

namespace tinylm {

Workers::Workers(uint32_t thread_count) {
  if (thread_count == 0) thread_count = std::max(1u, std::thread::hardware_concurrency());
  for (uint32_t i = 1; i < thread_count; ++i) threads_.emplace_back([this] { Serve(); });
}

Workers::~Workers() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  work_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void Workers::Run(uint32_t count, const std::function<void(uint32_t)>& task) {
  std::unique_lock lock(mutex_);
  task_ = &task;
  next_index_ = 0;
  count_ = count;
  if (count > 1) work_.notify_all();
  Drain(lock);
  done_.wait(lock, [this] { return running_count_ == 0; });
}

void Workers::Serve() {
  std::unique_lock lock(mutex_);
  while (!stopping_) {
    Drain(lock);
    work_.wait(lock, [this] { return stopping_ || next_index_ < count_; });
  }
}

// Runs tasks until no index is left.
void Workers::Drain(std::unique_lock<std::mutex>& lock) {
  while (next_index_ < count_) {
    const uint32_t index = next_index_++;
    const auto& task = *task_;
    ++running_count_;
    lock.unlock();
    task(index);
    lock.lock();
    if (--running_count_ == 0 && next_index_ >= count_) done_.notify_one();
  }
}

}  // namespace tinylm

// StepThread runs asynchronous attentions, for which a step waits later. Each client has one such
// thread, started at the first use; jobs run in order, each on all of the client's workers.
//
// Thread-safe.
#ifndef PQCACHED_CLIENT_STEP_THREAD_H_
#define PQCACHED_CLIENT_STEP_THREAD_H_

#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace pqcached::client {

class StepThread {
 public:
  StepThread() = default;
  // Completes the queued jobs.
  ~StepThread() {
    {
      const std::lock_guard lock(mutex_);
      stop_ = true;
    }
    changed_.notify_all();
    if (thread_.joinable()) thread_.join();
  }

  // Queues `job`, which must not throw. Throws when memory or a thread cannot be had; then the job
  // is not run.
  void Run(std::function<void()> job) {
    {
      const std::lock_guard lock(mutex_);
      if (!thread_.joinable()) thread_ = std::thread([this] { Serve(); });
      jobs_.push_back(std::move(job));
    }
    changed_.notify_one();
  }

 private:
  void Serve() {
    std::vector<std::function<void()>> taken;  // swapped with jobs_, so that both keep their memory
    for (;;) {
      {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [this] { return stop_ || !jobs_.empty(); });
        if (jobs_.empty()) return;
        taken.swap(jobs_);
      }
      for (const std::function<void()>& job : taken) job();
      taken.clear();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::function<void()>> jobs_;
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace pqcached::client

#endif  // PQCACHED_CLIENT_STEP_THREAD_H_

// StepThread: where attentions run that a step does not wait for at once. One thread per client,
// started at the first use; jobs run in order, each on all of the client's workers.
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
  // Runs what was given before.
  ~StepThread() {
    {
      const std::lock_guard lock(mutex_);
      stop_ = true;
    }
    changed_.notify_all();
    if (thread_.joinable()) thread_.join();
  }

  // `job` must not throw. Throws when there is no memory or no thread; then the job is not run.
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
    std::vector<std::function<void()>> taken;  // lends its memory to jobs_ in turn
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

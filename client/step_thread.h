// StepThread runs asynchronous attentions, for which a step waits later. Each client has one such
// thread, started at the first use; jobs run in order, each on all of the client's workers.
//
// Thread-safe.
#ifndef PQCACHED_CLIENT_STEP_THREAD_H_
#define PQCACHED_CLIENT_STEP_THREAD_H_

#include <functional>
#include <thread>
#include <vector>

#include "kernels/base/mutex.h"

namespace pqcached::client {

class StepThread {
 public:
  StepThread() = default;
  // Completes the queued jobs.
  ~StepThread() {
    {
      const base::MutexLock lock(&mutex_);
      stop_ = true;
    }
    changed_.SignalAll();
    if (thread_.joinable()) thread_.join();
  }

  // Queues `job`, which must not throw. Throws when memory or a thread cannot be had; then the job
  // is not run.
  void Run(std::function<void()> job) {
    {
      const base::MutexLock lock(&mutex_);
      if (!thread_.joinable()) thread_ = std::thread([this] { Serve(); });
      jobs_.push_back(std::move(job));
    }
    changed_.SignalOne();
  }

 private:
  void Serve() {
    std::vector<std::function<void()>> taken;  // swapped with jobs_, so that both keep their memory
    for (;;) {
      {
        const base::MutexLock lock(&mutex_);
        changed_.Wait(&mutex_,
                      [this]() PQCACHED_REQUIRES(mutex_) { return stop_ || !jobs_.empty(); });
        if (jobs_.empty()) return;
        taken.swap(jobs_);
      }
      for (const std::function<void()>& job : taken) job();
      taken.clear();
    }
  }

  base::Mutex mutex_;
  base::CondVar changed_;
  std::vector<std::function<void()>> jobs_ PQCACHED_GUARDED_BY(mutex_);
  bool stop_ PQCACHED_GUARDED_BY(mutex_) = false;
  std::thread thread_ PQCACHED_GUARDED_BY(mutex_);
};

}  // namespace pqcached::client

#endif  // PQCACHED_CLIENT_STEP_THREAD_H_

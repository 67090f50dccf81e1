// Executor runs calls on its own threads, so that work on the store never blocks gRPC's threads.
//
// Tenants share the threads by weight (fair_queue.h). The number of waiting tasks is limited, in
// all and by tenant; at a limit TryRun refuses. A task that waits until its deadline is answered
// then, by a thread of its own that runs no other work. The destructor finishes all accepted tasks.
//
// Thread-safe.
#ifndef PQCACHED_SERVICE_BASE_EXECUTOR_H_
#define PQCACHED_SERVICE_BASE_EXECUTOR_H_

#include <cstdint>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "kvstore/mutex.h"
#include "service/base/fair_queue.h"

namespace pqcached::service {

class Executor {
 public:
  struct Options {
    uint32_t threads = 1;
    FairQueue::Options queue;
  };

  explicit Executor(Options options);
  ~Executor();
  Executor(const Executor&) = delete;
  Executor& operator=(const Executor&) = delete;

  // Runs the task on a thread soon. Accepts no task at a limit, and returns which.
  [[nodiscard]] FairQueue::Answer TryRun(QueuedTask task);

  // Runs the task even past the limits: for work that must run and that another limit bounds (the
  // end of a session).
  void Run(QueuedTask task);

  // Returns the number of tasks of a tenant that wait, and that run.
  std::pair<size_t, uint32_t> CountsOf(const std::string& tenant) const;

 private:
  void Work();
  // Calls QueuedTask::expire of the tasks that wait past their deadline.
  void Expire();

  mutable kvstore::Mutex mutex_;
  kvstore::CondVar changed_;    // signalled when a task may have become startable
  kvstore::CondVar deadlines_;  // signalled when the earliest deadline has changed
  FairQueue queue_ ABSL_GUARDED_BY(mutex_);
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<std::thread> threads_;
};

}  // namespace pqcached::service

#endif  // PQCACHED_SERVICE_BASE_EXECUTOR_H_

// Executor carries out calls on its own threads, so that work on the store never holds up gRPC's.
//
// What waits is limited; past the limit TryRun refuses. The destructor finishes what was taken.
//
// Thread-safe.
#ifndef PQCACHED_SERVICE_EXECUTOR_H_
#define PQCACHED_SERVICE_EXECUTOR_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"

namespace pqcached::service {

class Executor {
 public:
  using Task = std::function<void()>;

  struct Options {
    uint32_t threads = 1;
    size_t max_pending = 1;  // tasks that wait; those at work are not counted
  };

  explicit Executor(Options options);
  ~Executor();
  Executor(const Executor&) = delete;
  Executor& operator=(const Executor&) = delete;

  // Returns false, without taking the task, when max_pending tasks wait already.
  [[nodiscard]] bool TryRun(Task task);

  // Takes the task past the limit: for work that must happen and that another limit bounds (the end
  // of a session).
  void Run(Task task);

 private:
  bool Push(Task task, bool even_past_limit);
  void Work();
  bool HasWork() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return stopping_ || !tasks_.empty();
  }

  const Options options_;
  absl::Mutex mutex_;
  std::deque<Task> tasks_ ABSL_GUARDED_BY(mutex_);
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<std::thread> threads_;
};

}  // namespace pqcached::service

#endif  // PQCACHED_SERVICE_EXECUTOR_H_

// Executor runs calls on its own threads, so that work on the store never blocks gRPC's threads.
//
// The number of waiting tasks is limited; at the limit TryRun refuses. Bulk tasks (rows of long
// prompts) may occupy only their share of the threads, so that brief calls find a free one; apart
// from that, tasks start in the order in which they were accepted. The destructor finishes all
// accepted tasks.
//
// Thread-safe.
#ifndef PQCACHED_SERVICE_BASE_EXECUTOR_H_
#define PQCACHED_SERVICE_BASE_EXECUTOR_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <optional>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "kvstore/mutex.h"

namespace pqcached::service {

class Executor {
 public:
  using Task = std::function<void()>;
  enum class Lane { kBrief, kBulk };

  struct Options {
    uint32_t threads = 1;
    uint32_t bulk_threads = 1;  // most of `threads` that bulk tasks may occupy; at least 1
    size_t max_pending = 1;     // tasks that wait; running tasks are not counted
  };

  explicit Executor(Options options);
  ~Executor();
  Executor(const Executor&) = delete;
  Executor& operator=(const Executor&) = delete;

  // Returns false, without accepting the task, when max_pending tasks wait already.
  [[nodiscard]] bool TryRun(Task task, Lane lane = Lane::kBrief);

  // Accepts the task even past the limit: for work that must run and that another limit bounds (the
  // end of a session).
  void Run(Task task);

 private:
  struct Waiting {
    Task task;
    uint64_t number = 0;  // order of acceptance over both lanes
  };

  bool Push(Task task, Lane lane, bool ignore_limit);
  void Work();
  // Returns the lane whose first task is next; nothing when no task may start.
  std::optional<Lane> Next() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool HasWork() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return stopping_ || Next().has_value();
  }

  const Options options_;
  kvstore::Mutex mutex_;
  kvstore::CondVar changed_;  // signalled when a task may have become startable
  std::deque<Waiting> brief_ ABSL_GUARDED_BY(mutex_);
  std::deque<Waiting> bulk_ ABSL_GUARDED_BY(mutex_);
  uint64_t next_number_ ABSL_GUARDED_BY(mutex_) = 0;
  uint32_t bulk_running_ ABSL_GUARDED_BY(mutex_) = 0;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<std::thread> threads_;
};

}  // namespace pqcached::service

#endif  // PQCACHED_SERVICE_BASE_EXECUTOR_H_

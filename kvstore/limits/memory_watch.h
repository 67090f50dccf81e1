// MemoryWatch calls a function at a fixed interval, on its own thread, until it is destroyed.
#ifndef PQCACHED_KVSTORE_LIMITS_MEMORY_WATCH_H_
#define PQCACHED_KVSTORE_LIMITS_MEMORY_WATCH_H_

#include <functional>

#include "absl/time/time.h"
#include "kernels/base/worker.h"

namespace pqcached::kvstore {

class MemoryWatch {
 public:
  MemoryWatch(absl::Duration interval, std::function<void()> check);
  // Waits for a call in progress.
  ~MemoryWatch() { worker_.Stop(); }
  MemoryWatch(const MemoryWatch&) = delete;
  MemoryWatch& operator=(const MemoryWatch&) = delete;

 private:
  void ScheduleNext();

  const absl::Duration interval_;
  const std::function<void()> check_;
  base::Worker worker_{"pqc-memory"};
};

}  // namespace pqcached::kvstore

#endif  // PQCACHED_KVSTORE_LIMITS_MEMORY_WATCH_H_

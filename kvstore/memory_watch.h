// MemoryWatch calls a function at a fixed interval, on its own thread, until it is destroyed.
#ifndef PQCACHED_KVSTORE_MEMORY_WATCH_H_
#define PQCACHED_KVSTORE_MEMORY_WATCH_H_

#include <functional>
#include <thread>

#include "absl/time/time.h"
#include "kvstore/mutex.h"

namespace pqcached::kvstore {

class MemoryWatch {
 public:
  MemoryWatch(absl::Duration interval, std::function<void()> check);
  // Waits for a call in progress.
  ~MemoryWatch();
  MemoryWatch(const MemoryWatch&) = delete;
  MemoryWatch& operator=(const MemoryWatch&) = delete;

 private:
  void Run();

  const absl::Duration interval_;
  const std::function<void()> check_;
  Mutex mutex_;
  CondVar stopped_;
  bool stop_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace pqcached::kvstore

#endif  // PQCACHED_KVSTORE_MEMORY_WATCH_H_

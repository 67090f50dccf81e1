#ifndef PQCACHED_TESTS_TINYLM_WORKERS_H_
#define PQCACHED_TESTS_TINYLM_WORKERS_H_

// Workers runs loops on a few threads of its own and the calling one.

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace tinylm {

// Single-thread: one Run at a time.
class Workers {
 public:
  // `thread_count` >= 1 includes the calling thread; 0 = the number of the machine's cores.
  explicit Workers(uint32_t thread_count = 0);
  ~Workers();

  // Calls task(i) once for each i < count, in any order, and returns when all calls have returned.
  // Tasks must not throw.
  void Run(uint32_t count, const std::function<void(uint32_t)>& task);

 private:
  void Serve();
  void Drain(std::unique_lock<std::mutex>& lock);

  std::mutex mutex_;
  std::condition_variable work_, done_;
  const std::function<void(uint32_t)>* task_ = nullptr;
  uint32_t next_index_ = 0, count_ = 0, running_count_ = 0;
  bool stopping_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace tinylm

#endif  // PQCACHED_TESTS_TINYLM_WORKERS_H_

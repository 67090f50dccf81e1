// Workers are the threads on which the kernels of one client run: either the engine's, through its
// hook, or a small pool of the client's own.
//
// Thread-safe: when several calls run at once, one uses the threads and the others run on their own
// thread only.
#ifndef PQCACHED_CLIENT_LOCAL_WORKERS_H_
#define PQCACHED_CLIENT_LOCAL_WORKERS_H_

#include <atomic>
#include <cstdint>
#include <map>
#include <thread>
#include <vector>

#include "kernels/base/mutex.h"
#include "kvstore/read/layer_view.h"
#include "pqcached/client.h"

namespace pqcached::client {

class Workers {
 public:
  struct Options {
    pqc_parallel_for hook = nullptr;  // null = own threads
    void* hook_context = nullptr;
    uint32_t thread_count = 0;  // 0 = all cores
  };
  explicit Workers(const Options& options);
  ~Workers();
  Workers(const Workers&) = delete;
  Workers& operator=(const Workers&) = delete;

  // Changes the number of threads, for runs that begin later; 0 = all cores. Waits for a run in
  // progress on the own threads.
  void SetThreadCount(uint32_t thread_count);

  // Returns the interface for kernels, which borrows from *this. It keeps its number of threads as
  // a caller knows it, also when that number changes.
  const kvstore::ParallelFor& parallel_for() const {
    return *parallel_for_.load(std::memory_order_acquire);
  }
  uint32_t worker_count() const { return parallel_for().worker_count; }

 private:
  using Body = kvstore::ParallelFor::Body;

  // Selects the interface for so many workers; makes it at its first use.
  void SelectLocked(uint32_t worker_count) PQCACHED_REQUIRES(run_mutex_);
  void Run(uint32_t worker_count, uint32_t task_count, const Body& body);
  void RunByHook(uint32_t worker_count, uint32_t task_count, const Body& body);
  // Runs tasks until none is left.
  void TakeTasks(uint32_t worker);
  bool Enter();
  void Leave();
  // `seen`: the round before the first one in which it takes part.
  void Serve(uint32_t worker, uint32_t seen);
  void StartThreads(uint32_t worker_count) PQCACHED_REQUIRES(run_mutex_);
  void StopThreads() PQCACHED_REQUIRES(run_mutex_);

  const Options options_;
  std::atomic<const kvstore::ParallelFor*> parallel_for_ = nullptr;
  base::Mutex run_mutex_;  // held during a run
  // By number of workers. None is removed, because callers hold references.
  std::map<uint32_t, kvstore::ParallelFor> interfaces_ PQCACHED_GUARDED_BY(run_mutex_);
  std::vector<std::thread> threads_ PQCACHED_GUARDED_BY(run_mutex_);

  // Present run. Written before the gate opens, read by threads inside.
  const Body* body_ = nullptr;
  uint32_t task_count_ = 0;
  uint32_t worker_limit_ = 0;  // workers below it may take tasks
  std::atomic<uint32_t> next_task_ = 0;
  std::atomic<uint32_t> gate_ = 0;   // top bit: open; other bits: number of threads inside
  std::atomic<uint32_t> round_ = 0;  // increased for each run, and at the end
  std::atomic<bool> stop_ = false;
};

}  // namespace pqcached::client

#endif  // PQCACHED_CLIENT_LOCAL_WORKERS_H_

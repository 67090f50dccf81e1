// Workers are the threads on which the kernels of one client run: either the engine's, through its
// hook, or a small pool of the client's own.
//
// Thread-safe: when several calls run at once, one uses the threads and the others run on their own
// thread only.
#ifndef PQCACHED_CLIENT_LOCAL_WORKERS_H_
#define PQCACHED_CLIENT_LOCAL_WORKERS_H_

#include <atomic>
#include <cstdint>
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

  // Returns the interface for kernels, which borrows from *this.
  const kvstore::ParallelFor& parallel_for() const { return parallel_for_; }
  uint32_t worker_count() const { return parallel_for_.worker_count; }

 private:
  using Body = kvstore::ParallelFor::Body;

  void Run(uint32_t task_count, const Body& body);
  void RunByHook(uint32_t task_count, const Body& body);
  // Runs tasks until none is left.
  void TakeTasks(uint32_t worker);
  bool Enter();
  void Leave();
  void Serve(uint32_t worker);
  void StartThreads() PQCACHED_REQUIRES(run_mutex_);

  const Options options_;
  kvstore::ParallelFor parallel_for_;
  base::Mutex run_mutex_;  // held during a run
  std::vector<std::thread> threads_ PQCACHED_GUARDED_BY(run_mutex_);

  // Present run. Written before the gate opens, read by threads inside.
  const Body* body_ = nullptr;
  uint32_t task_count_ = 0;
  std::atomic<uint32_t> next_task_ = 0;
  std::atomic<uint32_t> gate_ = 0;   // top bit: open; other bits: number of threads inside
  std::atomic<uint32_t> round_ = 0;  // increased for each run, and at the end
  std::atomic<bool> stop_ = false;
};

}  // namespace pqcached::client

#endif  // PQCACHED_CLIENT_LOCAL_WORKERS_H_

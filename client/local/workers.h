// Workers: the threads that the kernels of one client run on. Either the engine's, by its hook, or a
// small pool of the client's own.
//
// Thread-safe: when several calls run at once, one gets the threads and the others run alone.
#ifndef PQCACHED_CLIENT_LOCAL_WORKERS_H_
#define PQCACHED_CLIENT_LOCAL_WORKERS_H_

#include <atomic>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

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

  // Borrows from *this.
  const kvstore::ParallelFor& parallel_for() const { return parallel_for_; }
  uint32_t worker_count() const { return parallel_for_.worker_count; }

 private:
  using Body = kvstore::ParallelFor::Body;

  void Run(uint32_t task_count, const Body& body);
  void RunByHook(uint32_t task_count, const Body& body);
  // Takes tasks until there are none.
  void TakeTasks(uint32_t worker);
  bool Enter();
  void Leave();
  void Serve(uint32_t worker);
  void StartThreads();

  const Options options_;
  kvstore::ParallelFor parallel_for_;
  std::mutex run_mutex_;  // of the run under way
  std::vector<std::thread> threads_;

  // Of the run under way. Written before the gate opens, read inside.
  const Body* body_ = nullptr;
  uint32_t task_count_ = 0;
  std::atomic<uint32_t> next_task_ = 0;
  std::atomic<uint32_t> gate_ = 0;   // the top bit: open; the others: threads inside
  std::atomic<uint32_t> round_ = 0;  // raised for each run, and for the end
  std::atomic<bool> stop_ = false;
};

}  // namespace pqcached::client

#endif  // PQCACHED_CLIENT_LOCAL_WORKERS_H_

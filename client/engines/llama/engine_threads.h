// EngineThreads computes on the threads of llama.cpp's CPU backend, which spin between nodes:
// other threads would compete with them for the cores. (Builds of ggml without OpenMP start them
// for each node.)
//
// It has an instance of the CPU backend of its own, to which it gives graphs of one node. One
// thread at a time.
#ifndef PQCACHED_CLIENT_ENGINES_LLAMA_ENGINE_THREADS_H_
#define PQCACHED_CLIENT_ENGINES_LLAMA_ENGINE_THREADS_H_

#include <cstdint>

#include "client/engines/llama/ggml_api.h"
#include "client/engines/llama/own_rows.h"

namespace pqcached::llama {

class EngineThreads {
 public:
  explicit EngineThreads(const GgmlApi& api);
  ~EngineThreads();
  EngineThreads(const EngineThreads&) = delete;
  EngineThreads& operator=(const EngineThreads&) = delete;

  // False when the CPU backend or memory could not be had.
  bool is_usable() const { return cpu_ != nullptr && job_graph_ != nullptr; }

  void SetThreads(int count);

  // Computes a node of the engine's graph as llama.cpp does without the plug-in.
  GgmlStatus ComputeByGgml(GgmlTensor* node);

  Crew crew();

 private:
  static void RunJob(GgmlTensor* result, int ith, int nth, void* self);
  void Run(void (*work)(void* context, uint32_t thread), void* context);

  const GgmlApi& api_;
  GgmlBackend* cpu_ = nullptr;
  GgmlContext* context_ = nullptr;
  GgmlGraph* node_graph_ = nullptr;
  GgmlGraph* job_graph_ = nullptr;
  void (*set_threads_)(GgmlBackend*, int) = nullptr;
  uint32_t threads_ = 1;
  void (*work_)(void* context, uint32_t thread) = nullptr;
  void* work_context_ = nullptr;
};

}  // namespace pqcached::llama

#endif  // PQCACHED_CLIENT_ENGINES_LLAMA_ENGINE_THREADS_H_

// Graph: what a stream is given between Begin and End, kept to be given again in one call (a CUDA graph).
//
// For decode steps: launches stay the same from step to step, and what changes stands in device tables. Thread-compatible.
#ifndef PQCACHED_GPU_GRAPH_H_
#define PQCACHED_GPU_GRAPH_H_

#include <cstddef>

#include "gpu/device.h"
#include "gpu/status.h"

struct CUgraphExec_st;  // a cudaGraphExec_t points to it

namespace pqcached::gpu {

class Graph {
 public:
  Graph() = default;
  ~Graph();
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;

  // From here to End, this thread's work for `stream`, and for streams that wait for its events, is kept instead of run.
  // Nothing may wait, allocate, or wait for events from before; the last event of each other stream is waited for.
  //
  // Errors: kInvalid  the stream captures already, or is the default stream
  Status Begin(kernels::cuda::Stream stream);

  // Replaces what was kept before.
  //
  // Errors: kFailed  something was done that cannot be kept: nothing is kept, the stream is as it was before Begin
  Status End();

  // Runs what was kept. Errors: kInvalid  nothing was kept
  Status Launch(kernels::cuda::Stream stream) const;

  bool is_ready() const { return exec_ != nullptr; }
  // Kernels, copies and host functions of what was kept.
  size_t node_count() const { return node_count_; }

 private:
  kernels::cuda::Stream stream_ = nullptr;  // between Begin and End
  CUgraphExec_st* exec_ = nullptr;
  size_t node_count_ = 0;
};

}  // namespace pqcached::gpu

#endif  // PQCACHED_GPU_GRAPH_H_

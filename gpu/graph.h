// Graph records the work that a stream receives between Begin and End and replays it in one call (a
// CUDA graph).
//
// Made for decode steps: their launches are the same in every step, and the data that changes is in
// device tables. Thread-compatible.
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

  // Starts recording. Until End, work that this thread enqueues on `stream`, and on streams that
  // wait for its events, is recorded instead of run. The recorded code must not wait on the host,
  // allocate, or wait for events recorded before Begin. Every other stream that takes part must be
  // joined: `stream` must wait for its last event.
  //
  // Errors: kInvalid  the stream captures already, or is the default stream
  Status Begin(kernels::cuda::Stream stream);

  // Ends the recording and replaces the previous graph.
  //
  // Errors: kFailed  an operation cannot be captured: the previous graph stays, and the stream is
  //                  as it was before Begin
  Status End();

  // Replays the graph on `stream`. Errors: kInvalid  nothing was recorded
  Status Launch(kernels::cuda::Stream stream) const;

  bool is_ready() const { return exec_ != nullptr; }
  // Returns the number of kernels, copies and host functions in the graph.
  size_t node_count() const { return node_count_; }

 private:
  kernels::cuda::Stream stream_ = nullptr;  // between Begin and End
  CUgraphExec_st* exec_ = nullptr;
  size_t node_count_ = 0;
};

}  // namespace pqcached::gpu

#endif  // PQCACHED_GPU_GRAPH_H_

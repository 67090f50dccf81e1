#include "gpu/graph.h"

#include <cuda_runtime.h>

#include <utility>

namespace pqcached::gpu {

Graph::~Graph() {
  if (exec_ != nullptr) (void)cudaGraphExecDestroy(exec_);
}

Status Graph::Begin(kernels::cuda::Stream stream) {
  if (stream == nullptr) return {Code::kInvalid, "the default stream cannot be captured"};
  // The thread-local mode leaves other threads (which may page-lock in the background)
  // unrestricted.
  const cudaError_t error = cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal);
  if (error == cudaErrorIllegalState) {
    (void)cudaGetLastError();  // clears the error, so that the next launch does not report it
    return {Code::kInvalid, "the stream captures already"};
  }
  if (error == cudaSuccess) stream_ = stream;
  return FromCuda(error, "beginning a capture");
}

Status Graph::End() {
  const kernels::cuda::Stream stream = std::exchange(stream_, nullptr);
  if (stream == nullptr) return {Code::kInvalid, "no capture has begun"};
  cudaGraph_t graph = nullptr;
  cudaError_t error = cudaStreamEndCapture(stream, &graph);
  cudaGraphExec_t exec = nullptr;
  size_t node_count = 0;
  if (error == cudaSuccess) error = cudaGraphGetNodes(graph, nullptr, &node_count);
  if (error == cudaSuccess) error = cudaGraphInstantiate(&exec, graph, 0);
  if (graph != nullptr) (void)cudaGraphDestroy(graph);
  if (error != cudaSuccess) {
    (void)cudaGetLastError();
    return FromCuda(error, "ending a capture");
  }
  if (exec_ != nullptr) (void)cudaGraphExecDestroy(exec_);
  exec_ = exec;
  node_count_ = node_count;
  return {};
}

Status Graph::Launch(kernels::cuda::Stream stream) const {
  if (exec_ == nullptr) return {Code::kInvalid, "nothing was captured"};
  return FromCuda(cudaGraphLaunch(exec_, stream), "launching a graph");
}

}  // namespace pqcached::gpu

// KernelStatus, which every CUDA kernel function returns, and the stream type that it takes.
//
// Headers of kernels/cuda compile without nvcc and name no CUDA type except the stream. Unless
// stated otherwise, all pointers in arguments are addresses that the device can read (device
// memory, or the device address of page-locked memory). The stream orders all work; no function
// waits or allocates, so that a step can be captured in a CUDA graph. Sizes in arguments are
// *capacities* that determine the launch; counts that change from step to step are read from tables
// on the device.
//
// Thread-safe as long as outputs and scratch are not shared between streams.
#ifndef PQCACHED_KERNELS_CUDA_STATUS_H_
#define PQCACHED_KERNELS_CUDA_STATUS_H_

#include <cstdint>

struct CUstream_st;  // a cudaStream_t points to it

namespace pqcached::kernels::cuda {

using Stream = CUstream_st*;

// Reports whether the launches were accepted; later errors are reported by a synchronisation.
// gpu/status.h converts it to a Status with a message.
struct [[nodiscard]] KernelStatus {
  int cuda_error = 0;  // cudaError_t

  bool ok() const { return cuda_error == 0; }
};

}  // namespace pqcached::kernels::cuda

#endif  // PQCACHED_KERNELS_CUDA_STATUS_H_

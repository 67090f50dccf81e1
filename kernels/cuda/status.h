// What every CUDA kernel returns, and the stream that it takes.
//
// Headers of kernels/cuda compile without nvcc and name no CUDA types but the stream's. All pointers
// in their arguments are to memory that the device can read (device memory, or the device address of
// page-locked memory) unless said; all work is ordered by the stream, nothing waits, and nothing is
// allocated, so that a step can be captured in a CUDA graph. Sizes in arguments are *capacities* that
// fix the launch; counts that change from step to step are read from tables on the device.
//
// Thread-safe as long as outputs and scratch are not shared between streams.
#ifndef PQCACHED_KERNELS_CUDA_STATUS_H_
#define PQCACHED_KERNELS_CUDA_STATUS_H_

#include <cstdint>

struct CUstream_st;  // a cudaStream_t points to it

namespace pqcached::kernels::cuda {

using Stream = CUstream_st*;

// Whether the launches were accepted; what goes wrong later shows at a synchronisation.
// gpu/cuda_error.h gives the words.
struct [[nodiscard]] KernelStatus {
  int cuda_error = 0;  // cudaError_t

  bool ok() const { return cuda_error == 0; }
};

}  // namespace pqcached::kernels::cuda

#endif  // PQCACHED_KERNELS_CUDA_STATUS_H_

// Launch helper and device functions that many kernels share.
//
// Launch is typed and does not use <<<>>>, so that tests can compile the same source as C++ against
// an emulation of the device (tests/gpu/emulation).
#ifndef PQCACHED_KERNELS_CUDA_LAUNCH_CUH_
#define PQCACHED_KERNELS_CUDA_LAUNCH_CUH_

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <utility>

#include "kernels/cuda/status.h"

// Placed before loops over arrays that should be kept in registers.
#if defined(PQCACHED_CUDA_EMULATION)
#define PQC_UNROLL
#define PQC_UNROLL_4
#else
#define PQC_UNROLL _Pragma("unroll")
#define PQC_UNROLL_4 _Pragma("unroll 4")
#endif

namespace pqcached::kernels::cuda {

inline constexpr uint32_t kWarpThreads = 32;
inline constexpr uint32_t kAllLanes = 0xFFFFFFFFu;

struct LaunchShape {
  dim3 blocks;
  uint32_t threads = 0;     // a multiple of kWarpThreads
  size_t shared_bytes = 0;  // at most 48 KiB
};

// Launches `kernel`. Does nothing when a dimension of the grid is 0.
template <typename... Parameters, typename... Arguments>
KernelStatus Launch(void (*kernel)(Parameters...), const LaunchShape& shape, Stream stream,
                    Arguments&&... arguments) {
  if (shape.blocks.x == 0 || shape.blocks.y == 0 || shape.blocks.z == 0) return {};
  cudaLaunchConfig_t config{};
  config.gridDim = shape.blocks;
  config.blockDim = dim3(shape.threads);
  config.dynamicSmemBytes = shape.shared_bytes;
  config.stream = stream;
  return {cudaLaunchKernelEx(&config, kernel, std::forward<Arguments>(arguments)...)};
}

inline KernelStatus Clear(void* memory, size_t bytes, Stream stream) {
  return bytes == 0 ? KernelStatus{} : KernelStatus{cudaMemsetAsync(memory, 0, bytes, stream)};
}

// Returns the block's shared memory (LaunchShape::shared_bytes bytes) as a T.
template <typename T>
__device__ T& Shared() {
#if defined(PQCACHED_CUDA_EMULATION)
  return *static_cast<T*>(pqcached::emulation::SharedMemory());
#else
  extern __shared__ uint4 pqcached_shared_memory[];
  return *reinterpret_cast<T*>(pqcached_shared_memory);
#endif
}

__device__ inline uint32_t LaneIndex() { return threadIdx.x % kWarpThreads; }
__device__ inline uint32_t WarpIndex() { return threadIdx.x / kWarpThreads; }
__device__ inline uint32_t WarpCount() { return blockDim.x / kWarpThreads; }

template <typename T>
__host__ __device__ constexpr T Smaller(T a, T b) {
  return b < a ? b : a;
}
template <typename T>
__host__ __device__ constexpr T Larger(T a, T b) {
  return a < b ? b : a;
}

// Numbers of some heads, 1, 4, 8 or 16, which vector loads read together.
template <uint32_t kHeads>
struct alignas(Smaller<size_t>(16, sizeof(float) * kHeads)) HeadFloats {
  float of[kHeads];
};

__device__ inline float WarpMax(float value) {
  for (int distance = 16; distance > 0; distance /= 2) {
    value = Larger(value, __shfl_xor_sync(kAllLanes, value, distance));
  }
  return value;
}

template <typename T>
__device__ T WarpSum(T value) {
  for (int distance = 16; distance > 0; distance /= 2) {
    value += __shfl_xor_sync(kAllLanes, value, distance);
  }
  return value;
}

// Returns the sum over the block to every thread. `slots` has one entry per warp and may be reused
// after the next barrier.
template <typename T>
__device__ T BlockSum(T value, T* slots) {
  value = WarpSum(value);
  __syncthreads();
  if (LaneIndex() == 0) slots[WarpIndex()] = value;
  __syncthreads();
  T sum = slots[0];
  for (uint32_t warp = 1; warp < WarpCount(); ++warp) sum += slots[warp];
  return sum;
}

// Returns the sum of `value` over the threads before this one; `slots` as above.
__device__ inline uint32_t BlockSumBefore(uint32_t value, uint32_t* slots) {
  uint32_t inclusive = value;
  for (uint32_t distance = 1; distance < kWarpThreads; distance *= 2) {
    const uint32_t other = __shfl_up_sync(kAllLanes, inclusive, distance);
    if (LaneIndex() >= distance) inclusive += other;
  }
  __syncthreads();
  if (LaneIndex() == kWarpThreads - 1) slots[WarpIndex()] = inclusive;
  __syncthreads();
  uint32_t before = inclusive - value;
  for (uint32_t warp = 0; warp < WarpIndex(); ++warp) before += slots[warp];
  return before;
}

}  // namespace pqcached::kernels::cuda

#endif  // PQCACHED_KERNELS_CUDA_LAUNCH_CUH_

// A stand-in for CUDA's header: runs kernels on the CPU, so that tests judge them on machines without a GPU.
//
// Found before CUDA's own header when a .cu file is compiled as C++. A *block* runs alone, one after
// another in an order that changes from launch to launch; its threads are fibers of one host thread,
// switched at barriers and warp collectives. Stopped with a message: a barrier or collective that
// some thread of the block or warp does not reach (or reaches on another line), a launch beyond the
// limits of the hardware, work that waits for what never comes. Shared memory is poisoned before
// each block, memory from cudaMalloc when it is allocated; what lies outside is for ASan to find.
// Streams are lazy: their work runs at the next synchronisation, and work of different streams in
// random order as far as events allow, so that a missing event shows. So do captured graphs; calls
// that a capture forbids end it (capture.cc).
//
// Not modelled: time, caches, memory order inside a block between barriers, static __shared__
// variables (kernels/cuda/launch.cuh hands out the dynamic kind), warps with absent lanes.
#ifndef PQCACHED_TESTS_GPU_EMULATION_CUDA_RUNTIME_H_
#define PQCACHED_TESTS_GPU_EMULATION_CUDA_RUNTIME_H_

#define PQCACHED_CUDA_EMULATION 1

#include <math.h>

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <tuple>
#include <type_traits>
#include <utility>

// NOLINTBEGIN: names and signatures are CUDA's.
#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)

struct uint3 {
  unsigned x, y, z;
};
struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

enum cudaError_t {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorMemoryAllocation = 2,
  cudaErrorInitializationError = 3,
  cudaErrorInvalidConfiguration = 9,
  cudaErrorInsufficientDriver = 35,
  cudaErrorNoDevice = 100,
  cudaErrorInvalidDevice = 101,
  cudaErrorNoKernelImageForDevice = 209,
  cudaErrorInvalidResourceHandle = 400,
  cudaErrorIllegalState = 401,
  cudaErrorNotReady = 600,
  cudaErrorHostMemoryAlreadyRegistered = 712,
  cudaErrorHostMemoryNotRegistered = 713,
  cudaErrorNotPermitted = 800,
  cudaErrorNotSupported = 801,
  cudaErrorStreamCaptureUnsupported = 900,
  cudaErrorStreamCaptureInvalidated = 901,
  cudaErrorStreamCaptureMerge = 902,
  cudaErrorStreamCaptureUnmatched = 903,
  cudaErrorStreamCaptureUnjoined = 904,
  cudaErrorStreamCaptureIsolation = 905,
  cudaErrorCapturedEvent = 907,
  cudaErrorUnknown = 999,
};
enum cudaMemcpyKind {
  cudaMemcpyHostToHost = 0,
  cudaMemcpyHostToDevice = 1,
  cudaMemcpyDeviceToHost = 2,
  cudaMemcpyDeviceToDevice = 3,
  cudaMemcpyDefault = 4,
};
enum cudaMemoryType {
  cudaMemoryTypeUnregistered = 0,
  cudaMemoryTypeHost = 1,
  cudaMemoryTypeDevice = 2,
  cudaMemoryTypeManaged = 3,
};
enum cudaDeviceAttr {
  cudaDevAttrMultiProcessorCount = 16,
  cudaDevAttrComputeCapabilityMajor = 75,
  cudaDevAttrComputeCapabilityMinor = 76,
  cudaDevAttrHostRegisterSupported = 99,
  cudaDevAttrHostRegisterReadOnlySupported = 113,
};
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize = 8 };
struct cudaPointerAttributes {
  cudaMemoryType type;
  int device;
  void* devicePointer;
  void* hostPointer;
};
struct cudaDeviceProp {
  char name[256];
};

inline constexpr unsigned cudaHostAllocDefault = 0;
inline constexpr unsigned cudaHostAllocMapped = 2;
inline constexpr unsigned cudaHostRegisterDefault = 0;
inline constexpr unsigned cudaHostRegisterPortable = 1;
inline constexpr unsigned cudaHostRegisterMapped = 2;
inline constexpr unsigned cudaHostRegisterReadOnly = 8;
inline constexpr unsigned cudaStreamNonBlocking = 1;
inline constexpr unsigned cudaEventBlockingSync = 1;
inline constexpr unsigned cudaEventDisableTiming = 2;

using cudaStream_t = struct CUstream_st*;
using cudaEvent_t = struct CUevent_st*;
using cudaGraph_t = struct CUgraph_st*;
using cudaGraphExec_t = struct CUgraphExec_st*;
using cudaGraphNode_t = struct CUgraphNode_st*;
using cudaHostFn_t = void (*)(void*);
enum cudaStreamCaptureMode {
  cudaStreamCaptureModeGlobal = 0,
  cudaStreamCaptureModeThreadLocal = 1,
  cudaStreamCaptureModeRelaxed = 2,
};
enum cudaStreamCaptureStatus {
  cudaStreamCaptureStatusNone = 0,
  cudaStreamCaptureStatusActive = 1,
  cudaStreamCaptureStatusInvalidated = 2,
};

const char* cudaGetErrorName(cudaError_t error);
const char* cudaGetErrorString(cudaError_t error);
cudaError_t cudaGetLastError();
cudaError_t cudaGetDeviceCount(int* count);
cudaError_t cudaGetDevice(int* device);
cudaError_t cudaSetDevice(int device);
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device);
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device);
cudaError_t cudaDriverGetVersion(int* version);
cudaError_t cudaRuntimeGetVersion(int* version);
cudaError_t cudaDeviceSynchronize();
cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total_bytes);
cudaError_t cudaMalloc(void** memory, size_t bytes);
cudaError_t cudaFree(void* memory);
cudaError_t cudaHostAlloc(void** memory, size_t bytes, unsigned flags);
cudaError_t cudaFreeHost(void* memory);
cudaError_t cudaHostRegister(void* memory, size_t bytes, unsigned flags);
cudaError_t cudaHostUnregister(void* memory);
cudaError_t cudaHostGetDevicePointer(void** device, void* host, unsigned flags);
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* memory);
cudaError_t cudaMemcpy(void* target, const void* source, size_t bytes, cudaMemcpyKind kind);
cudaError_t cudaMemcpyAsync(void* target, const void* source, size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream);
cudaError_t cudaMemcpy2DAsync(void* target, size_t target_pitch, const void* source,
                              size_t source_pitch, size_t width, size_t height, cudaMemcpyKind kind,
                              cudaStream_t stream);
cudaError_t cudaMemsetAsync(void* target, int value, size_t bytes, cudaStream_t stream);
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags);
cudaError_t cudaStreamDestroy(cudaStream_t stream);
cudaError_t cudaStreamSynchronize(cudaStream_t stream);
cudaError_t cudaStreamQuery(cudaStream_t stream);
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags = 0);
cudaError_t cudaStreamGetDevice(cudaStream_t stream, int* device);
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode);
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode);
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph);
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status);
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status,
                                     unsigned long long* id);
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* exec, cudaGraph_t graph,
                                 unsigned long long flags = 0);
cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t* nodes, size_t* count);
cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream);
cudaError_t cudaGraphDestroy(cudaGraph_t graph);
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec);
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data);
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags);
cudaError_t cudaEventDestroy(cudaEvent_t event);
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream);
cudaError_t cudaEventQuery(cudaEvent_t event);
cudaError_t cudaEventSynchronize(cudaEvent_t event);
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t end);

struct cudaLaunchAttribute {};
struct cudaLaunchConfig_t {
  dim3 gridDim;
  dim3 blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
  cudaLaunchAttribute* attrs;
  unsigned numAttrs;
};

namespace pqcached::emulation {

cudaError_t Launch(const cudaLaunchConfig_t& config, const void* kernel, std::function<void()> run);
cudaError_t SetSharedLimit(const void* kernel, int bytes);

// The dynamic shared memory of the block that runs.
void* SharedMemory();

// The last value of each lane of the calling warp, once all of its lanes have called with the same
// `what` from the same line.
const uint64_t* Collect(unsigned mask, const char* what, uint64_t value, unsigned where);

template <typename T>
uint64_t ToBits(T value) {
  static_assert(sizeof(T) <= sizeof(uint64_t));
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  return bits;
}
template <typename T>
T FromBits(uint64_t bits) {
  T value;
  std::memcpy(&value, &bits, sizeof(T));
  return value;
}

unsigned Lane();

}  // namespace pqcached::emulation

template <typename... Parameters, typename... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               Arguments&&... arguments) {
  return pqcached::emulation::Launch(
      *config, reinterpret_cast<const void*>(kernel),
      [kernel, values = std::tuple<Parameters...>(std::forward<Arguments>(arguments)...)] {
        std::apply(kernel, values);
      });
}

template <typename... Parameters>
cudaError_t cudaFuncSetAttribute(void (*kernel)(Parameters...), cudaFuncAttribute, int value) {
  return pqcached::emulation::SetSharedLimit(reinterpret_cast<const void*>(kernel), value);
}

extern thread_local uint3 threadIdx;
extern thread_local uint3 blockIdx;
extern thread_local dim3 blockDim;
extern thread_local dim3 gridDim;
inline constexpr int warpSize = 32;

#define PQC_HERE unsigned where = __builtin_LINE()

void __syncthreads(PQC_HERE);
inline void __threadfence() {}
inline void __syncwarp(unsigned mask = 0xFFFFFFFFu, PQC_HERE) {
  pqcached::emulation::Collect(mask, "__syncwarp", 0, where);
}
template <typename T>
T __shfl_sync(unsigned mask, T value, int lane, PQC_HERE) {
  using namespace pqcached::emulation;
  return FromBits<T>(Collect(mask, "__shfl_sync", ToBits(value), where)[lane & 31]);
}
template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int lanes, PQC_HERE) {
  using namespace pqcached::emulation;
  const uint64_t* all = Collect(mask, "__shfl_xor_sync", ToBits(value), where);
  return FromBits<T>(all[(Lane() ^ static_cast<unsigned>(lanes)) & 31u]);
}
template <typename T>
T __shfl_up_sync(unsigned mask, T value, unsigned distance, PQC_HERE) {
  using namespace pqcached::emulation;
  const uint64_t* all = Collect(mask, "__shfl_up_sync", ToBits(value), where);
  return Lane() < distance ? value : FromBits<T>(all[Lane() - distance]);
}
inline unsigned __ballot_sync(unsigned mask, bool predicate, PQC_HERE) {
  const uint64_t* all =
      pqcached::emulation::Collect(mask, "__ballot_sync", predicate ? 1 : 0, where);
  unsigned bits = 0;
  for (unsigned lane = 0; lane < 32; ++lane) bits |= static_cast<unsigned>(all[lane]) << lane;
  return bits;
}
inline bool __any_sync(unsigned mask, bool predicate, PQC_HERE) {
  return __ballot_sync(mask, predicate, where) != 0;
}
inline bool __all_sync(unsigned mask, bool predicate, PQC_HERE) {
  return __ballot_sync(mask, predicate, where) == 0xFFFFFFFFu;
}
inline unsigned __reduce_add_sync(unsigned mask, unsigned value, PQC_HERE) {
  const uint64_t* all = pqcached::emulation::Collect(mask, "__reduce_add_sync", value, where);
  unsigned sum = 0;
  for (unsigned lane = 0; lane < 32; ++lane) sum += static_cast<unsigned>(all[lane]);
  return sum;
}

inline int __popc(unsigned bits) { return std::popcount(bits); }
inline int __ffs(unsigned bits) { return bits == 0 ? 0 : std::countr_zero(bits) + 1; }
inline int __clz(unsigned bits) { return std::countl_zero(bits); }
inline unsigned __float_as_uint(float value) { return std::bit_cast<unsigned>(value); }
inline float __uint_as_float(unsigned bits) { return std::bit_cast<float>(bits); }
template <typename T>
T __ldg(const T* address) {
  return *address;
}

// Only one fiber runs at a time.
template <typename T>
T atomicAdd(T* address, std::type_identity_t<T> value) {
  static_assert(std::is_same_v<T, int> || std::is_same_v<T, unsigned> ||
                std::is_same_v<T, unsigned long long> || std::is_same_v<T, float> ||
                std::is_same_v<T, double>);
  const T before = *address;
  *address = before + value;
  return before;
}
template <typename T>
T atomicMax(T* address, std::type_identity_t<T> value) {
  static_assert(std::is_integral_v<T>);
  const T before = *address;
  if (before < value) *address = value;
  return before;
}
template <typename T>
T atomicExch(T* address, std::type_identity_t<T> value) {
  const T before = *address;
  *address = value;
  return before;
}
template <typename T>
T atomicOr(T* address, std::type_identity_t<T> value) {
  static_assert(std::is_integral_v<T>);
  const T before = *address;
  *address = before | value;
  return before;
}

#undef PQC_HERE
// NOLINTEND

#endif  // PQCACHED_TESTS_GPU_EMULATION_CUDA_RUNTIME_H_

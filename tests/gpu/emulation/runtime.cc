// The emulated runtime: memory, lazy streams, events, devices.
#include <cstdio>
#include <cstdlib>
#include <string>

#include "tests/gpu/emulation/fibers.h"
#include "tests/gpu/emulation/state.h"

namespace pqcached::emulation {

Runtime& State() {
  static auto* runtime = new Runtime;  // lives as long as objects that call at exit
  return *runtime;
}

cudaError_t Remember(cudaError_t error) {
  if (error != cudaSuccess) State().last_error = error;
  return error;
}

cudaError_t Failure(const char* name) {
  if (State().in_host_function) {
    std::fprintf(stderr, "emulated host function: calls %s\n", name);
    return Remember(cudaErrorNotPermitted);
  }
  auto& failures = State().failures;
  const auto found = failures.find(name);
  if (found == failures.end() || found->second.second-- > 0) return cudaSuccess;
  const cudaError_t error = found->second.first;
  failures.erase(found);
  return Remember(error);
}

namespace {

constexpr size_t kDefaultSharedBytes = 48 << 10;
constexpr size_t kLargestSharedBytes = 227 << 10;

bool Contains(const std::map<const std::byte*, size_t>& ranges, const void* memory) {
  const auto* address = static_cast<const std::byte*>(memory);
  auto next = ranges.upper_bound(address);
  if (next == ranges.begin()) return false;
  --next;
  return address < next->first + next->second;
}

bool IsRunnable(const CUstream_st& stream) {
  if (stream.queue.empty()) return false;
  const CUstream_st::Operation& next = stream.queue.front();
  return next.event == nullptr || next.event->done >= next.ticket;
}

// Runs the next work of some stream that can go on; false when none can.
bool RunSome() {
  Runtime& state = State();
  const size_t count = state.streams.size() + 1;
  const size_t first = state.random() % count;
  for (size_t i = 0; i < count; ++i) {
    const size_t index = (first + i) % count;
    CUstream_st& stream = index == 0 ? state.default_stream : *state.streams[index - 1];
    if (!IsRunnable(stream)) continue;
    const CUstream_st::Operation operation = std::move(stream.queue.front());
    stream.queue.pop_front();
    if (operation.run) operation.run();
    return true;
  }
  return false;
}

template <typename Done>
void RunUntil(Done done) {
  while (!done()) {
    if (RunSome()) continue;
    std::fprintf(stderr, "emulated stream: waits for an event that nothing records\n");
    std::abort();
  }
}

void RunAll() {
  while (RunSome()) {
  }
}

void Copy(void* target, const void* source, size_t bytes) {
  if (bytes > 0) std::memmove(target, source, bytes);
}

}  // namespace

// The default stream waits for all others, and they for it.
void Enqueue(cudaStream_t stream, std::function<void()> run) {
  if (stream == nullptr) {
    // What captures is not waited for; no step should have work here.
    if (RefuseWhileCapturing("work on the default stream") != cudaSuccess) return;
    RunAll();
    run();
  } else if (stream->capture != nullptr) {
    AddToCapture(stream, std::move(run));
  } else {
    stream->queue.push_back({.run = std::move(run)});
  }
}

void FailCall(const char* name, cudaError_t error, int after) {
  const Lock lock(State().mutex);
  State().failures[name] = {error, after};
}

void SetMachine(const Machine& machine) {
  const Lock lock(State().mutex);
  State().machine = machine;
}

void Reset() {
  const Lock lock(State().mutex);
  State().machine = {};
  State().failures.clear();
  State().last_error = cudaSuccess;
}

cudaError_t SetSharedLimit(const void* kernel, int bytes) {
  const Lock lock(State().mutex);
  if (bytes < 0 || static_cast<size_t>(bytes) > kLargestSharedBytes) {
    return Remember(cudaErrorInvalidValue);
  }
  State().shared_limits[kernel] = static_cast<size_t>(bytes);
  return cudaSuccess;
}

cudaError_t Launch(const cudaLaunchConfig_t& config, const void* kernel,
                   std::function<void()> run) {
  PQC_MAY_FAIL("cudaLaunchKernelEx");
  const uint64_t thread_count = uint64_t{config.blockDim.x} * config.blockDim.y * config.blockDim.z;
  const auto limit = State().shared_limits.find(kernel);
  const size_t shared_limit =
      limit == State().shared_limits.end() ? kDefaultSharedBytes : limit->second;
  if (thread_count == 0 || thread_count > 1024 || config.gridDim.x == 0 || config.gridDim.y == 0 ||
      config.gridDim.z == 0 || config.gridDim.x > 0x7FFFFFFFu || config.gridDim.y > 65535 ||
      config.gridDim.z > 65535 || config.dynamicSmemBytes > shared_limit) {
    return Remember(cudaErrorInvalidConfiguration);
  }
  if (thread_count % 32 != 0) {
    std::fprintf(stderr, "emulated kernel: blocks of %u threads leave a warp incomplete\n",
                 static_cast<unsigned>(thread_count));
    std::abort();
  }
  const Grid grid = {config.gridDim, config.blockDim, config.dynamicSmemBytes};
  Enqueue(config.stream, [grid, run = std::move(run), order = State().launch_count++] {
    RunGrid(grid, run, order);
  });
  return cudaSuccess;
}

}  // namespace pqcached::emulation

using namespace pqcached::emulation;

const char* cudaGetErrorName(cudaError_t error) {
  switch (error) {
    case cudaSuccess:
      return "cudaSuccess";
    case cudaErrorMemoryAllocation:
      return "cudaErrorMemoryAllocation";
    case cudaErrorInsufficientDriver:
      return "cudaErrorInsufficientDriver";
    case cudaErrorNoDevice:
      return "cudaErrorNoDevice";
    case cudaErrorNotSupported:
      return "cudaErrorNotSupported";
    default:
      return "cudaErrorOther";
  }
}

const char* cudaGetErrorString(cudaError_t error) { return cudaGetErrorName(error); }

cudaError_t cudaGetLastError() {
  const Lock lock(State().mutex);
  return std::exchange(State().last_error, cudaSuccess);
}

cudaError_t cudaGetDeviceCount(int* count) {
  PQC_MAY_FAIL("cudaGetDeviceCount");
  if (State().machine.count_error != cudaSuccess) return Remember(State().machine.count_error);
  if (State().machine.device_count == 0) return Remember(cudaErrorNoDevice);
  *count = State().machine.device_count;
  return cudaSuccess;
}

cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
  PQC_MAY_FAIL("cudaSetDevice");
  return device >= 0 && device < State().machine.device_count ? cudaSuccess
                                                              : Remember(cudaErrorInvalidDevice);
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  PQC_MAY_FAIL("cudaDeviceGetAttribute");
  switch (attribute) {
    case cudaDevAttrMultiProcessorCount:
      *value = 4;
      break;
    case cudaDevAttrComputeCapabilityMajor:
      *value = State().machine.compute_major;
      break;
    case cudaDevAttrComputeCapabilityMinor:
      *value = State().machine.compute_minor;
      break;
    case cudaDevAttrHostRegisterSupported:
      *value = 1;
      break;
    case cudaDevAttrHostRegisterReadOnlySupported:
      *value = State().machine.registers_read_only ? 1 : 0;
      break;
  }
  return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
  std::snprintf(properties->name, sizeof(properties->name), "emulated device");
  return cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int* version) {
  *version = State().machine.driver_version;
  return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = 13000;
  return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize() {
  PQC_NOT_IN_CAPTURE("cudaDeviceSynchronize");
  const auto all_done = [] {
    bool done = State().default_stream.queue.empty();
    for (const CUstream_st* stream : State().streams) done = done && stream->queue.empty();
    return done;
  };
  RunUntil(all_done);
  return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total_bytes) {
  *free_bytes = size_t{8} << 30;
  *total_bytes = size_t{16} << 30;
  return cudaSuccess;
}

cudaError_t cudaMalloc(void** memory, size_t bytes) {
  PQC_NOT_IN_CAPTURE("cudaMalloc");
  *memory = nullptr;
  if (bytes == 0) return cudaSuccess;
  // Exactly as many bytes, so that ASan sees what lies behind.
  if (posix_memalign(memory, 256, bytes) != 0) return Remember(cudaErrorMemoryAllocation);
  std::memset(*memory, 0xFF, bytes);
  State().device_memory[static_cast<std::byte*>(*memory)] = bytes;
  return cudaSuccess;
}

cudaError_t cudaFree(void* memory) {
  PQC_NOT_IN_CAPTURE("cudaFree");
  if (memory == nullptr) return cudaSuccess;
  RunAll();
  if (State().device_memory.erase(static_cast<std::byte*>(memory)) == 0) {
    return Remember(cudaErrorInvalidValue);
  }
  std::free(memory);
  return cudaSuccess;
}

cudaError_t cudaHostAlloc(void** memory, size_t bytes, unsigned) {
  PQC_NOT_IN_CAPTURE("cudaHostAlloc");
  *memory = nullptr;
  if (bytes == 0) return cudaSuccess;
  if (posix_memalign(memory, 4096, bytes) != 0) return Remember(cudaErrorMemoryAllocation);
  std::memset(*memory, 0xFF, bytes);
  State().pinned_memory[static_cast<std::byte*>(*memory)] = bytes;
  return cudaSuccess;
}

cudaError_t cudaFreeHost(void* memory) {
  PQC_NOT_IN_CAPTURE("cudaFreeHost");
  if (memory == nullptr) return cudaSuccess;
  RunAll();
  if (State().pinned_memory.erase(static_cast<std::byte*>(memory)) == 0) {
    return Remember(cudaErrorInvalidValue);
  }
  std::free(memory);
  return cudaSuccess;
}

cudaError_t cudaHostRegister(void* memory, size_t bytes, unsigned flags) {
  PQC_NOT_IN_CAPTURE("cudaHostRegister");
  if (bytes == 0) return Remember(cudaErrorInvalidValue);
  if ((flags & cudaHostRegisterReadOnly) != 0 && !State().machine.registers_read_only) {
    return Remember(cudaErrorNotSupported);
  }
  if (Contains(State().registered_memory, memory)) {
    return Remember(cudaErrorHostMemoryAlreadyRegistered);
  }
  State().registered_memory[static_cast<std::byte*>(memory)] = bytes;
  return cudaSuccess;
}

cudaError_t cudaHostUnregister(void* memory) {
  PQC_NOT_IN_CAPTURE("cudaHostUnregister");
  RunAll();
  return State().registered_memory.erase(static_cast<std::byte*>(memory)) > 0
             ? cudaSuccess
             : Remember(cudaErrorHostMemoryNotRegistered);
}

cudaError_t cudaHostGetDevicePointer(void** device, void* host, unsigned) {
  PQC_MAY_FAIL("cudaHostGetDevicePointer");
  if (!Contains(State().pinned_memory, host) && !Contains(State().registered_memory, host)) {
    return Remember(cudaErrorInvalidValue);
  }
  *device = host;
  return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* memory) {
  PQC_MAY_FAIL("cudaPointerGetAttributes");
  *attributes = {cudaMemoryTypeUnregistered, 0, nullptr, nullptr};
  if (Contains(State().device_memory, memory)) {
    attributes->type = cudaMemoryTypeDevice;
  } else if (Contains(State().pinned_memory, memory) ||
             Contains(State().registered_memory, memory)) {
    attributes->type = cudaMemoryTypeHost;
  }
  return cudaSuccess;
}

cudaError_t cudaMemcpy(void* target, const void* source, size_t bytes, cudaMemcpyKind) {
  PQC_NOT_IN_CAPTURE("cudaMemcpy");
  RunAll();
  Copy(target, source, bytes);
  return cudaSuccess;
}

// Copies from pageable memory read it before the call returns; those to it end before.
cudaError_t cudaMemcpyAsync(void* target, const void* source, size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream) {
  PQC_MAY_FAIL("cudaMemcpyAsync");
  const auto is_pageable = [](const void* memory) {
    return !Contains(State().device_memory, memory) && !Contains(State().pinned_memory, memory) &&
           !Contains(State().registered_memory, memory);
  };
  if ((kind == cudaMemcpyHostToDevice && is_pageable(source)) ||
      (kind == cudaMemcpyDeviceToHost && is_pageable(target))) {
    const cudaError_t refused = RefuseWhileCapturing("a copy of pageable memory");
    if (refused != cudaSuccess) return refused;
  }
  if (kind == cudaMemcpyHostToDevice && is_pageable(source)) {
    const auto* begin = static_cast<const std::byte*>(source);
    const std::string bytes_now(reinterpret_cast<const char*>(begin), bytes);
    Enqueue(stream, [target, bytes_now] { Copy(target, bytes_now.data(), bytes_now.size()); });
    return cudaSuccess;
  }
  Enqueue(stream, [target, source, bytes] { Copy(target, source, bytes); });
  if (kind == cudaMemcpyDeviceToHost && is_pageable(target)) return cudaStreamSynchronize(stream);
  return cudaSuccess;
}

cudaError_t cudaMemcpy2DAsync(void* target, size_t target_pitch, const void* source,
                              size_t source_pitch, size_t width, size_t height, cudaMemcpyKind kind,
                              cudaStream_t stream) {
  PQC_MAY_FAIL("cudaMemcpy2DAsync");
  if (width > target_pitch || width > source_pitch) return Remember(cudaErrorInvalidValue);
  for (size_t row = 0; row < height; ++row) {
    const cudaError_t error = cudaMemcpyAsync(
        static_cast<std::byte*>(target) + row * target_pitch,
        static_cast<const std::byte*>(source) + row * source_pitch, width, kind, stream);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void* target, int value, size_t bytes, cudaStream_t stream) {
  PQC_MAY_FAIL("cudaMemsetAsync");
  Enqueue(stream, [target, value, bytes] {
    if (bytes > 0) std::memset(target, value, bytes);
  });
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  PQC_MAY_FAIL("cudaStreamCreateWithFlags");
  *stream = new CUstream_st;
  State().streams.push_back(*stream);
  return cudaSuccess;
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  PQC_NOT_IN_CAPTURE("cudaStreamDestroy");
  RunUntil([stream] { return stream->queue.empty(); });
  std::erase(State().streams, stream);
  delete stream;
  return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  PQC_NOT_IN_CAPTURE("cudaStreamSynchronize");
  if (stream == nullptr) return cudaDeviceSynchronize();
  RunUntil([stream] { return stream->queue.empty(); });
  return cudaSuccess;
}

cudaError_t cudaStreamQuery(cudaStream_t stream) {
  PQC_NOT_IN_CAPTURE("cudaStreamQuery");
  RunSome();
  return stream == nullptr || stream->queue.empty() ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t cudaStreamGetDevice(cudaStream_t stream, int* device) {
  if (stream != nullptr && stream->capture != nullptr) {
    return Invalidate(*stream->capture, cudaErrorStreamCaptureUnsupported, "cudaStreamGetDevice");
  }
  *device = 0;
  return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  PQC_MAY_FAIL("cudaEventCreateWithFlags");
  *event = new CUevent_st;
  return cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  PQC_NOT_IN_CAPTURE("cudaEventDestroy");
  RunAll();
  delete event;
  return cudaSuccess;
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
  PQC_NOT_IN_CAPTURE("cudaEventQuery");
  if (event->capture != nullptr) return Remember(cudaErrorCapturedEvent);
  RunSome();
  return event->done >= event->recorded ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  PQC_NOT_IN_CAPTURE("cudaEventSynchronize");
  if (event->capture != nullptr) return Remember(cudaErrorCapturedEvent);
  RunUntil([event] { return event->done >= event->recorded; });
  return cudaSuccess;
}

cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t, cudaEvent_t) {
  *milliseconds = 0.0f;
  return cudaSuccess;
}

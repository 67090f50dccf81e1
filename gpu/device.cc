#include "gpu/device.h"
#include "kernels/base/status_macros.h"

#include <cuda_runtime.h>

#include <map>
#include <mutex>
#include <utility>

namespace pqcached::gpu {
namespace {

// LockedMemory counts the page locks of the whole process, because CUDA registers memory per
// process. It is never destroyed: objects with static lifetime may unlock at exit.
struct LockedMemory {
  std::mutex mutex;
  std::map<std::byte*, uint32_t> holders;  // start address -> number of locks held
};

LockedMemory& Locked() {
  static auto* locked = new LockedMemory;
  return *locked;
}

std::string VersionName(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

Status CountDevices(int& count) {
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error == cudaErrorInsufficientDriver) {
    int driver = 0;
    int runtime = 0;
    (void)cudaDriverGetVersion(&driver);
    (void)cudaRuntimeGetVersion(&runtime);
    const std::string found =
        driver == 0 ? "there is no driver" : "the driver supports CUDA " + VersionName(driver);
    return {Code::kNoDevice, found + ", the runtime needs " + VersionName(runtime)};
  }
  return FromCuda(error, "looking for a GPU");
}

}  // namespace

Status FindDevice(int index, Device& device) {
  int count = 0;
  RETURN_IF_ERROR(CountDevices(count));
  if (index < 0 || index >= count) {
    return {Code::kInvalid, "device " + std::to_string(index) + " of " + std::to_string(count)};
  }
  int values[4] = {};
  constexpr cudaDeviceAttr kAttributes[] = {
      cudaDevAttrMultiProcessorCount, cudaDevAttrComputeCapabilityMajor,
      cudaDevAttrComputeCapabilityMinor, cudaDevAttrHostRegisterReadOnlySupported};
  for (int i = 0; i < 4; ++i) {
    const cudaError_t error = cudaDeviceGetAttribute(&values[i], kAttributes[i], index);
    if (error != cudaSuccess) return FromCuda(error, "asking for an attribute of the device");
  }
  cudaDeviceProp properties;
  const cudaError_t error = cudaGetDeviceProperties(&properties, index);
  if (error != cudaSuccess) return FromCuda(error, "asking for the name of the device");
  const auto capability = static_cast<uint32_t>(values[1] * 10 + values[2]);
  if (capability < kMinComputeCapability) {
    return {Code::kUnsupported, std::string(properties.name) + " has compute capability " +
                                    std::to_string(values[1]) + "." + std::to_string(values[2]) +
                                    "; the kernels need 8.0"};
  }
  device = {.index = index,
            .name = properties.name,
            .multiprocessor_count = static_cast<uint32_t>(values[0]),
            .compute_capability = capability,
            .registers_read_only = values[3] != 0};
  return {};
}

DeviceBuffer::~DeviceBuffer() {
  if (data_ != nullptr) (void)cudaFree(data_);
}

Status DeviceBuffer::Allocate(size_t size_bytes) {
  if (data_ != nullptr) (void)cudaFree(std::exchange(data_, nullptr));
  size_bytes_ = 0;
  const cudaError_t error = cudaMalloc(&data_, size_bytes);
  if (error != cudaSuccess) {
    (void)cudaGetLastError();  // clears the error, so that the next launch does not report it
    data_ = nullptr;
    size_t free_bytes = 0;
    size_t total_bytes = 0;
    (void)cudaMemGetInfo(&free_bytes, &total_bytes);
    return FromCuda(error, "allocating " + std::to_string(size_bytes) +
                               " bytes of device memory, of which " + std::to_string(free_bytes) +
                               " are free");
  }
  size_bytes_ = size_bytes;
  return {};
}

PinnedBuffer::~PinnedBuffer() {
  if (data_ != nullptr) (void)cudaFreeHost(data_);
}

Status PinnedBuffer::Allocate(size_t size_bytes) {
  if (data_ != nullptr) (void)cudaFreeHost(std::exchange(data_, nullptr));
  size_bytes_ = 0;
  // Every supported device has unified addressing: host and device use the same address.
  const cudaError_t error = cudaHostAlloc(&data_, size_bytes, cudaHostAllocMapped);
  if (error != cudaSuccess) {
    (void)cudaGetLastError();  // clears the error, so that the next launch does not report it
    data_ = nullptr;
    return FromCuda(error,
                    "allocating " + std::to_string(size_bytes) + " bytes of page-locked memory");
  }
  size_bytes_ = size_bytes;
  return {};
}

Status LockHostMemory(std::byte* memory, size_t size_bytes, HostAccess access,
                      std::byte*& on_device) {
  const std::string what = "page-locking " + std::to_string(size_bytes) + " bytes";
  LockedMemory& locked = Locked();
  const std::lock_guard lock(locked.mutex);
  uint32_t& holders = locked.holders[memory];
  cudaError_t error = cudaSuccess;
  if (holders == 0) {
    const unsigned flags = cudaHostRegisterMapped | cudaHostRegisterPortable |
                           (access == HostAccess::kRead ? cudaHostRegisterReadOnly : 0);
    error = cudaHostRegister(memory, size_bytes, flags);
  }
  void* address = nullptr;
  if (error == cudaSuccess) {
    error = cudaHostGetDevicePointer(&address, memory, 0);
    if (error != cudaSuccess && holders == 0) (void)cudaHostUnregister(memory);
  }
  if (error != cudaSuccess) {
    (void)cudaGetLastError();  // clears the error, so that the next launch does not report it
    if (holders == 0) locked.holders.erase(memory);
    return FromCuda(error, what);
  }
  ++holders;
  on_device = static_cast<std::byte*>(address);
  return {};
}

void UnlockHostMemory(std::byte* memory) {
  LockedMemory& locked = Locked();
  const std::lock_guard lock(locked.mutex);
  const auto found = locked.holders.find(memory);
  if (found == locked.holders.end() || --found->second > 0) return;
  locked.holders.erase(found);
  (void)cudaHostUnregister(memory);
}

CurrentDevice::CurrentDevice(int index) {
  cudaError_t error = cudaGetDevice(&previous_device_);
  if (error == cudaSuccess && previous_device_ != index) {
    error = cudaSetDevice(index);
  } else {
    previous_device_ = -1;  // no previous device to restore
  }
  status_ = FromCuda(error, "going to device " + std::to_string(index));
}

CurrentDevice::~CurrentDevice() {
  if (previous_device_ >= 0) (void)cudaSetDevice(previous_device_);
}

OwnedStream::~OwnedStream() {
  if (stream_ != nullptr) (void)cudaStreamDestroy(stream_);
}

Status OwnedStream::Create() {
  return FromCuda(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "creating a stream");
}

OwnedEvent::~OwnedEvent() {
  if (event_ != nullptr) (void)cudaEventDestroy(event_);
}

Status OwnedEvent::Create(Waiting waiting) {
  const unsigned flags = waiting == Waiting::kSleeps
                             ? cudaEventDisableTiming | cudaEventBlockingSync
                             : cudaEventDisableTiming;
  return FromCuda(cudaEventCreateWithFlags(&event_, flags), "creating an event");
}

Status OwnedEvent::Record(kernels::cuda::Stream stream) {
  return FromCuda(cudaEventRecord(event_, stream), "recording an event");
}

Status OwnedEvent::MakeWait(kernels::cuda::Stream stream) const {
  return FromCuda(cudaStreamWaitEvent(stream, event_, 0), "waiting for an event");
}

Status OwnedEvent::Wait() const {
  return FromCuda(cudaEventSynchronize(event_), "waiting for an event");
}

RelaxedCaptureMode::RelaxedCaptureMode() {
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  (void)cudaThreadExchangeStreamCaptureMode(&mode);
  mode_ = mode;
}

RelaxedCaptureMode::~RelaxedCaptureMode() {
  auto mode = static_cast<cudaStreamCaptureMode>(mode_);
  (void)cudaThreadExchangeStreamCaptureMode(&mode);
}

Status FindCapture(kernels::cuda::Stream stream, CaptureId& capture) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  unsigned long long id = 0;
  const cudaError_t error = cudaStreamGetCaptureInfo(stream, &status, &id);
  capture = {.is_capturing = status != cudaStreamCaptureStatusNone, .id = id};
  return FromCuda(error, "asking whether the stream captures");
}

Status CheckDevicePointer(const void* memory, std::string_view name, const Device& device) {
  cudaPointerAttributes attributes = {};
  const cudaError_t error = cudaPointerGetAttributes(&attributes, memory);
  if (error != cudaSuccess) return FromCuda(error, name);
  if (attributes.type == cudaMemoryTypeUnregistered) {
    return {Code::kInvalid,
            std::string(name) + " is pageable host memory; a device pointer is needed"};
  }
  if (attributes.type != cudaMemoryTypeDevice || attributes.device == device.index) return {};
  return {Code::kInvalid, std::string(name) + " is memory of device " +
                              std::to_string(attributes.device) + ", not " +
                              std::to_string(device.index)};
}

Status CheckStream(kernels::cuda::Stream stream, const Device& device) {
  CaptureId capture;
  RETURN_IF_ERROR(FindCapture(stream, capture));
  if (capture.is_capturing) return {};  // the question would invalidate the capture
  int index = -1;
  const cudaError_t error = cudaStreamGetDevice(stream, &index);
  if (error != cudaSuccess) return FromCuda(error, "asking for the device of the stream");
  if (index == device.index) return {};
  return {Code::kInvalid, "the stream belongs to device " + std::to_string(index) + ", not " +
                              std::to_string(device.index)};
}

}  // namespace pqcached::gpu

// RAII wrappers for a CUDA device: checks that a supported device exists, and owns its memory,
// streams and events.
//
// Destructors ignore errors, because the driver may already be unloaded at process exit.
// Thread-compatible; FindDevice is thread-safe.
#ifndef PQCACHED_GPU_DEVICE_H_
#define PQCACHED_GPU_DEVICE_H_

#include <cstddef>
#include <cstdint>
#include <new>
#include <string>

#include "gpu/status.h"

struct CUevent_st;  // a cudaEvent_t points to it

namespace pqcached::gpu {

struct Device {
  int index = -1;
  std::string name;
  uint32_t multiprocessor_count = 0;
  uint32_t compute_capability = 0;   // 90 means 9.0
  bool registers_read_only = false;  // can page-lock mappings that this process cannot write
};

inline constexpr uint32_t kMinComputeCapability = 80;

// Fills `device` with the properties of device `index`.
//
// Errors: kNoDevice     no device, no driver, or a driver older than the runtime (the message names
//                       both versions)
//         kInvalid      no device has that index
//         kUnsupported  the compute capability is below kMinComputeCapability
Status FindDevice(int index, Device& device);

// Device memory; contents are unspecified.
class DeviceBuffer {
 public:
  DeviceBuffer() = default;
  ~DeviceBuffer();
  DeviceBuffer(const DeviceBuffer&) = delete;
  DeviceBuffer& operator=(const DeviceBuffer&) = delete;

  // Frees the previous memory and allocates `size_bytes`.
  // Errors: kOutOfMemory  (the message gives the bytes wanted and the bytes free)
  Status Allocate(size_t size_bytes);

  void* data() const { return data_; }
  size_t size_bytes() const { return size_bytes_; }

 private:
  void* data_ = nullptr;
  size_t size_bytes_ = 0;
};

// Page-locked host memory that the device reads and writes in place: host and device use the same
// addresses. Contents are unspecified.
class PinnedBuffer {
 public:
  PinnedBuffer() = default;
  ~PinnedBuffer();
  PinnedBuffer(const PinnedBuffer&) = delete;
  PinnedBuffer& operator=(const PinnedBuffer&) = delete;

  // Frees the previous memory and allocates `size_bytes`.
  // Errors: kOutOfMemory  (the message gives the bytes wanted)
  Status Allocate(size_t size_bytes);

  void* data() const { return data_; }
  size_t size_bytes() const { return size_bytes_; }

 private:
  void* data_ = nullptr;
  size_t size_bytes_ = 0;
};

// LockHostMemory page-locks host memory for all devices. CUDA registers a piece of memory once per
// process, so locks are counted here: every successful call needs one UnlockHostMemory with the
// same `memory`, and the last one unlocks. `on_device` receives the address of the memory on the
// current device. Both functions are thread-safe; all callers that lock the same `memory` must pass
// the same size.
//
// Errors: kOutOfMemory, kFailed  the system refuses (limit of locked memory, cgroup)
enum class HostAccess { kRead, kReadWrite };  // access of this process to the memory
Status LockHostMemory(std::byte* memory, size_t size_bytes, HostAccess access,
                      std::byte*& on_device);
void UnlockHostMemory(std::byte* memory);

// Makes a device the calling thread's current device for the object's lifetime: a stream accepts
// work only from threads whose current device is the stream's.
class CurrentDevice {
 public:
  explicit CurrentDevice(int index);
  ~CurrentDevice();
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;

  const Status& status() const { return status_; }

 private:
  int previous_device_ = -1;
  Status status_;
};

// Runs `body`, which returns a Status, with `device` as the current device, and catches exceptions:
// they must not cross the boundary of the library.
template <class Body>
Status OnDevice(int device, const Body& body) noexcept {
  try {
    const CurrentDevice current(device);
    if (!current.status().ok()) return current.status();
    return body();
  } catch (const std::bad_alloc&) {
    return Status(Code::kOutOfMemory, "out of host memory");
  }
}

// Owns a stream that does not synchronise with the default stream.
class OwnedStream {
 public:
  OwnedStream() = default;
  ~OwnedStream();
  OwnedStream(const OwnedStream&) = delete;
  OwnedStream& operator=(const OwnedStream&) = delete;

  Status Create();
  kernels::cuda::Stream get() const { return stream_; }

 private:
  kernels::cuda::Stream stream_ = nullptr;
};

// Owns an event without timing. Waiting for an event that was never recorded returns at once.
class OwnedEvent {
 public:
  OwnedEvent() = default;
  ~OwnedEvent();
  OwnedEvent(const OwnedEvent&) = delete;
  OwnedEvent& operator=(const OwnedEvent&) = delete;

  // Selects how Wait blocks: kSpins returns sooner, kSleeps frees the core for other threads.
  enum class Waiting { kSpins, kSleeps };
  Status Create(Waiting waiting = Waiting::kSpins);
  // Records all work enqueued on `stream` so far.
  Status Record(kernels::cuda::Stream stream);
  // Makes `stream` wait until the work recorded last is done; the host does not wait.
  Status MakeWait(kernels::cuda::Stream stream) const;
  // Blocks the host until the work recorded last is done.
  Status Wait() const;

 private:
  CUevent_st* event_ = nullptr;
};

// Puts the calling thread into CUDA's relaxed capture mode for the object's lifetime, so that it
// may wait and page-lock while other threads capture graphs in the strictest mode. The thread's own
// calls are not part of any graph.
class RelaxedCaptureMode {
 public:
  RelaxedCaptureMode();
  ~RelaxedCaptureMode();
  RelaxedCaptureMode(const RelaxedCaptureMode&) = delete;
  RelaxedCaptureMode& operator=(const RelaxedCaptureMode&) = delete;

 private:
  int mode_;  // cudaStreamCaptureMode to restore
};

// Identifies the graph capture that a stream is part of. Two calls with equal ids belong to the
// same graph and are replayed together.
struct CaptureId {
  bool is_capturing = false;
  unsigned long long id = 0;

  friend bool operator==(const CaptureId&, const CaptureId&) = default;
};
Status FindCapture(kernels::cuda::Stream stream, CaptureId& capture);

// Checks that a kernel on `device` may read `memory`: memory of that device, or page-locked host
// memory.
//
// Errors: kInvalid  pageable host memory, or memory of another device (the message names `name`)
Status CheckDevicePointer(const void* memory, std::string_view name, const Device& device);

// Checks that the stream belongs to `device`. A stream that captures is not checked: the CUDA
// runtime refuses the question then.
//
// Errors: kInvalid  the stream belongs to another device than `device`
Status CheckStream(kernels::cuda::Stream stream, const Device& device);

}  // namespace pqcached::gpu

#endif  // PQCACHED_GPU_DEVICE_H_

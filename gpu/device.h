// The device and what belongs to it: whether there is one that these kernels run on, its memory, streams
// and events, as objects that give themselves back.
//
// Destructors ignore errors: at unload the driver may be gone already. Thread-compatible; FindDevice is
// thread-safe.
#ifndef PQCACHED_GPU_DEVICE_H_
#define PQCACHED_GPU_DEVICE_H_

#include <cstddef>
#include <cstdint>
#include <string>

#include "gpu/status.h"

struct CUevent_st;  // a cudaEvent_t points to it

namespace pqcached::gpu {

struct Device {
  int index = -1;
  std::string name;
  uint32_t multiprocessor_count = 0;
  uint32_t compute_capability = 0;   // 90: 9.0
  bool registers_read_only = false;  // page-locks mappings that this process cannot write
};

inline constexpr uint32_t kMinComputeCapability = 80;

// Fills `device` with what is known of device `index`.
//
// Errors: kNoDevice     no device, no driver, or one older than the runtime (the message names both versions)
//         kInvalid      there is no device of that index
//         kUnsupported  its compute capability is below kMinComputeCapability
Status FindDevice(int index, Device& device);

// Device memory; contents are unspecified.
class DeviceBuffer {
 public:
  DeviceBuffer() = default;
  ~DeviceBuffer();
  DeviceBuffer(const DeviceBuffer&) = delete;
  DeviceBuffer& operator=(const DeviceBuffer&) = delete;

  // Replaces what is held. Errors: kOutOfMemory (the message says how much was wanted and how much is
  // free).
  Status Allocate(size_t size_bytes);

  void* data() const { return data_; }
  size_t size_bytes() const { return size_bytes_; }

 private:
  void* data_ = nullptr;
  size_t size_bytes_ = 0;
};

// Page-locked host memory, which the device reads and writes where it lies: same addresses on both sides. Contents are
// unspecified.
class PinnedBuffer {
 public:
  PinnedBuffer() = default;
  ~PinnedBuffer();
  PinnedBuffer(const PinnedBuffer&) = delete;
  PinnedBuffer& operator=(const PinnedBuffer&) = delete;

  // Replaces what is held. Errors: kOutOfMemory (the message says how much was wanted)
  Status Allocate(size_t size_bytes);

  void* data() const { return data_; }
  size_t size_bytes() const { return size_bytes_; }

 private:
  void* data_ = nullptr;
  size_t size_bytes_ = 0;
};

// Page-locks memory of the host for all devices. CUDA knows memory as locked once in a process, so it is counted here:
// every call that succeeds wants an UnlockHostMemory with the same `memory`, and the last of them unlocks. `on_device` is
// where the current device finds it. Both are thread-safe; who asks for the same memory asks for the same size.
//
// Errors: kOutOfMemory, kFailed  the system refuses (limit of locked memory, cgroup)
enum class HostAccess { kRead, kReadWrite };  // of this process
Status LockHostMemory(std::byte* memory, size_t size_bytes, HostAccess access,
                      std::byte*& on_device);
void UnlockHostMemory(std::byte* memory);

// Makes a device the calling thread's for as long as it lives: streams take work only from threads on their device.
class CurrentDevice {
 public:
  explicit CurrentDevice(int index);
  ~CurrentDevice();
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;

  const Status& status() const { return status_; }

 private:
  int before_ = -1;
  Status status_;
};

// A stream of its own, which does not wait for the default stream.
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

// An event without timing. Before it is recorded, waiting for it does not wait.
class OwnedEvent {
 public:
  OwnedEvent() = default;
  ~OwnedEvent();
  OwnedEvent(const OwnedEvent&) = delete;
  OwnedEvent& operator=(const OwnedEvent&) = delete;

  // How Wait spends its time: kSpins is the sooner back, kSleeps leaves the core to others.
  enum class Waiting { kSpins, kSleeps };
  Status Create(Waiting waiting = Waiting::kSpins);
  // Marks what `stream` has been given so far.
  Status Record(kernels::cuda::Stream stream);
  // `stream` goes on when what was marked last is done; the host does not wait.
  Status MakeWait(kernels::cuda::Stream stream) const;
  // The host waits.
  Status Wait() const;

 private:
  CUevent_st* event_ = nullptr;
};

// Lets the calling thread wait and page-lock while other threads capture graphs in CUDA's strictest mode, for as long as it
// lives: what it does then is no part of a graph.
class BesideCaptures {
 public:
  BesideCaptures();
  ~BesideCaptures();
  BesideCaptures(const BesideCaptures&) = delete;
  BesideCaptures& operator=(const BesideCaptures&) = delete;

 private:
  int mode_;  // cudaStreamCaptureMode, before and after
};

// A capture that a stream is in. Two calls that find the same one are replayed together.
struct CaptureId {
  bool is_capturing = false;
  unsigned long long id = 0;

  friend bool operator==(const CaptureId&, const CaptureId&) = default;
};
Status FindCapture(kernels::cuda::Stream stream, CaptureId& capture);

// Whether a kernel on `device` may read `memory`: its memory, or page-locked host memory.
//
// Errors: kInvalid  pageable host memory, or memory of another device (the message says so, with `name`)
Status CheckDevicePointer(const void* memory, std::string_view name, const Device& device);

// Errors: kInvalid  the stream belongs to another device than `device`
Status CheckStream(kernels::cuda::Stream stream, const Device& device);

}  // namespace pqcached::gpu

#endif  // PQCACHED_GPU_DEVICE_H_

// What the files of the emulated runtime share: its state, streams, events, captures.
#ifndef PQCACHED_TESTS_GPU_EMULATION_STATE_H_
#define PQCACHED_TESTS_GPU_EMULATION_STATE_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "tests/gpu/emulation/emulation.h"

namespace pqcached::emulation {

// Work in the order in which it was captured: each node runs after the earlier nodes that it names.
struct CaptureNode {
  std::function<void()> run;
  std::vector<size_t> after;
};

// From cudaStreamBeginCapture to cudaStreamEndCapture.
struct Capture {
  unsigned long long id = 0;
  bool active = true;
  cudaError_t error = cudaSuccess;  // what made it invalid
  cudaStream_t origin = nullptr;
  std::vector<CaptureNode> nodes;
  // Of each stream that takes part: nodes that its next one comes after.
  std::map<cudaStream_t, std::vector<size_t>> frontiers;
};

}  // namespace pqcached::emulation

struct CUevent_st {
  uint64_t recorded = 0;
  uint64_t done = 0;
  // When it was last recorded by a stream that captured: what it stands for there.
  std::shared_ptr<pqcached::emulation::Capture> capture;
  std::vector<size_t> frontier;
};

struct CUstream_st {
  struct Operation {
    std::function<void()> run;
    CUevent_st* event = nullptr;  // waits until `done` of it reaches the ticket
    uint64_t ticket = 0;
  };
  std::deque<Operation> queue;
  std::shared_ptr<pqcached::emulation::Capture> capture;  // while it captures
};

namespace pqcached::emulation {

// All that the runtime keeps, under one lock.
struct Runtime {
  std::recursive_mutex mutex;
  Machine machine;
  std::map<std::string, std::pair<cudaError_t, int>> failures;
  std::map<const std::byte*, size_t> device_memory;
  std::map<const std::byte*, size_t> pinned_memory;  // allocated
  std::map<const std::byte*, size_t> registered_memory;
  std::map<const void*, size_t> shared_limits;
  CUstream_st default_stream;
  std::deque<CUstream_st*> streams;
  std::vector<std::shared_ptr<Capture>> captures;  // the active ones
  std::mt19937_64 random{1};
  uint64_t launch_count = 0;
  unsigned long long capture_count = 0;
  bool in_host_function = false;
  cudaError_t last_error = cudaSuccess;
};

Runtime& State();

using Lock = std::lock_guard<std::recursive_mutex>;

cudaError_t Remember(cudaError_t error);

// What a call that tests told to fail, or one from inside a host function, returns.
cudaError_t Failure(const char* name);

// An error, and the end of all captures, when a call that no capture allows is made while a stream captures.
cudaError_t RefuseWhileCapturing(const char* name);

// Adds to a capture what a stream is given; makes it invalid. The stream captures.
void AddToCapture(CUstream_st* stream, std::function<void()> run);
cudaError_t Invalidate(Capture& capture, cudaError_t error, const char* why);

// Runs when the work of the stream before it is done, or takes part in the stream's capture.
void Enqueue(cudaStream_t stream, std::function<void()> run);

#define PQC_MAY_FAIL(name)        \
  const Lock lock(State().mutex); \
  if (const cudaError_t failure = Failure(name); failure != cudaSuccess) return failure
// For calls that wait, allocate, or copy at once.
#define PQC_NOT_IN_CAPTURE(name) \
  PQC_MAY_FAIL(name);            \
  if (const cudaError_t refused = RefuseWhileCapturing(name); refused != cudaSuccess) return refused

}  // namespace pqcached::emulation

#endif  // PQCACHED_TESTS_GPU_EMULATION_STATE_H_

// What the sections of bench_gpu share: errors, memory that fills itself, and work timed side by side on the device.
#ifndef PQCACHED_TESTS_GPU_BENCH_BENCH_H_
#define PQCACHED_TESTS_GPU_BENCH_BENCH_H_

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "gpu/device.h"
#include "gpu/graph.h"
#include "kernels/cuda/status.h"
#include "tests/bench/report.h"
#include "tests/bench/rounds.h"

namespace pqcached::bench {

// Why a section cannot be measured here.
class Absent : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

void Check(const gpu::Status& status);
void Check(cudaError_t error, const char* what);
void Check(kernels::cuda::KernelStatus status, const char* what);

template <typename T>
class DeviceArray {
 public:
  explicit DeviceArray(size_t count) : count_(count) { Check(buffer_.Allocate(count * sizeof(T))); }
  explicit DeviceArray(const std::vector<T>& values) : DeviceArray(values.size()) { Set(values); }
  T* data() const { return static_cast<T*>(buffer_.data()); }
  size_t bytes() const { return count_ * sizeof(T); }
  void Set(const std::vector<T>& values) {
    Check(cudaMemcpy(data(), values.data(), bytes(), cudaMemcpyHostToDevice),
          "copying to the device");
  }
  std::vector<T> Get() const {
    std::vector<T> values(count_);
    Check(cudaMemcpy(values.data(), data(), bytes(), cudaMemcpyDeviceToHost),
          "copying from the device");
    return values;
  }

 private:
  gpu::DeviceBuffer buffer_;
  size_t count_;
};

// Fills memory of either side by repeating `pattern`.
void Repeat(void* memory, size_t size_bytes, const std::vector<std::byte>& pattern);

// Normally distributed, in fp16; about 1 MiB of it.
std::vector<std::byte> RandomHalfs(float deviation, uint32_t seed);

// Pieces of device work, each captured once and timed by events, in rounds as in tests/bench/rounds.h.
class DeviceRounds {
 public:
  // Gives the i-th repetition of the work to the stream.
  using Work = std::function<void(cudaStream_t stream, uint32_t i)>;

  explicit DeviceRounds(cudaStream_t stream) : stream_(stream) {}

  // Work that is given `repetitions` times in a row in one graph. Returns the index of the entry.
  size_t Add(std::string name, uint32_t repetitions, const Work& work);
  // Something that is timed elsewhere: returns seconds.
  size_t AddTimed(std::string name, std::function<double()> seconds);

  // Kernels, copies and clears of one repetition.
  double NodesPerRepetition(size_t entry) const;

  // One round to warm up, then `count` that are timed; prints a line per entry.
  void Run(int count);

  // Of one repetition.
  Stat Seconds(size_t entry) const { return StatOf(entries_[entry]->seconds); }
  // Medians over rounds of factor * seconds of `entry` / seconds of `other`.
  Stat Ratio(size_t entry, size_t other, double factor = 1.0) const;

 private:
  struct Entry {
    std::string name;
    uint32_t repetitions;
    gpu::Graph graph;
    std::function<double()> timed;
    std::vector<double> seconds;
  };

  double TimeOnce(Entry& entry);

  cudaStream_t stream_;
  std::vector<std::unique_ptr<Entry>> entries_;
};

// Seconds of device time that `work` takes on the stream.
double TimeOnDevice(cudaStream_t stream, const std::function<void()>& work);

// What a section gets.
struct Bench {
  gpu::Device device;
  cudaStream_t stream = nullptr;
  // Tiny sizes and one round: whether all of it runs, on the emulation, where times mean nothing.
  bool smoke = false;
  int rounds = 0;
  std::function<void(const std::string& name, const Stat& stat)> add;  // a figure by its name

  template <typename T>
  T Size(T full, T tiny) const {
    return smoke ? tiny : full;
  }
};

void BenchSelect(Bench& bench);
void BenchRows(Bench& bench);
void BenchBuild(Bench& bench);
void BenchStack(Bench& bench);
void BenchCache(Bench& bench);

}  // namespace pqcached::bench

#endif  // PQCACHED_TESTS_GPU_BENCH_BENCH_H_

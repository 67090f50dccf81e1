#include "tests/gpu/bench/bench.h"

#include <algorithm>
#include <cstdio>
#include <random>
#include <utility>

#include "kernels/base/dtype.h"

namespace pqcached::bench {

void Check(const gpu::Status& status) {
  if (!status.ok()) throw Absent(status.message());
}

void Check(cudaError_t error, const char* what) { Check(gpu::FromCuda(error, what)); }

void Check(kernels::cuda::KernelStatus status, const char* what) {
  Check(gpu::FromKernel(status, what));
}

void Repeat(void* memory, size_t size_bytes, const std::vector<std::byte>& pattern) {
  for (size_t at = 0; at < size_bytes; at += pattern.size()) {
    Check(cudaMemcpy(static_cast<std::byte*>(memory) + at, pattern.data(),
                     std::min(pattern.size(), size_bytes - at), cudaMemcpyDefault),
          "filling memory");
  }
}

std::vector<std::byte> RandomHalfs(float deviation, uint32_t seed) {
  constexpr uint32_t kCount = (512 << 10) - 8;  // shifted against powers of two
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0.0f, deviation);
  std::vector<std::byte> bytes(size_t{kCount} * 2);
  for (uint32_t i = 0; i < kCount; ++i) {
    kernels::StoreElement(kernels::DType::kF16, bytes.data(), i, normal(random));
  }
  return bytes;
}

double TimeOnDevice(cudaStream_t stream, const std::function<void()>& work) {
  struct Events {
    cudaEvent_t begin = nullptr;
    cudaEvent_t end = nullptr;
    ~Events() {
      if (begin != nullptr) (void)cudaEventDestroy(begin);
      if (end != nullptr) (void)cudaEventDestroy(end);
    }
  } events;
  Check(cudaEventCreateWithFlags(&events.begin, 0), "creating an event");
  Check(cudaEventCreateWithFlags(&events.end, 0), "creating an event");
  Check(cudaEventRecord(events.begin, stream), "recording an event");
  work();
  Check(cudaEventRecord(events.end, stream), "recording an event");
  Check(cudaEventSynchronize(events.end), "waiting for the device");
  float milliseconds = 0.0f;
  Check(cudaEventElapsedTime(&milliseconds, events.begin, events.end), "timing");
  return milliseconds * 1e-3;
}

size_t DeviceRounds::Add(std::string name, uint32_t repetitions, const Work& work) {
  auto entry = std::make_unique<Entry>();
  entry->name = std::move(name);
  entry->repetitions = repetitions;
  Check(entry->graph.Begin(stream_));
  for (uint32_t i = 0; i < repetitions; ++i) work(stream_, i);
  Check(entry->graph.End());
  entries_.push_back(std::move(entry));
  return entries_.size() - 1;
}

size_t DeviceRounds::AddTimed(std::string name, std::function<double()> seconds) {
  auto entry = std::make_unique<Entry>();
  entry->name = std::move(name);
  entry->repetitions = 1;
  entry->timed = std::move(seconds);
  entries_.push_back(std::move(entry));
  return entries_.size() - 1;
}

double DeviceRounds::NodesPerRepetition(size_t entry) const {
  return static_cast<double>(entries_[entry]->graph.node_count()) / entries_[entry]->repetitions;
}

double DeviceRounds::TimeOnce(Entry& entry) {
  if (entry.timed) return entry.timed();
  return TimeOnDevice(stream_, [&] { Check(entry.graph.Launch(stream_)); }) / entry.repetitions;
}

void DeviceRounds::Run(int count) {
  for (int round = -1; round < count; ++round) {
    for (size_t i = 0; i < entries_.size(); ++i) {
      Entry& entry = *entries_[(i + static_cast<size_t>(round + 1)) % entries_.size()];
      const double seconds = TimeOnce(entry);
      if (round >= 0) entry.seconds.push_back(seconds);
    }
  }
  for (const auto& entry : entries_) {
    const Stat stat = StatOf(entry->seconds);
    std::printf("  %-40s %12.2f us +- %.2f\n", entry->name.c_str(), stat.median * 1e6,
                stat.spread * 1e6);
  }
}

Stat DeviceRounds::Ratio(size_t entry, size_t other, double factor) const {
  std::vector<double> ratios;
  for (size_t round = 0; round < entries_[entry]->seconds.size(); ++round) {
    ratios.push_back(factor * entries_[entry]->seconds[round] / entries_[other]->seconds[round]);
  }
  return StatOf(std::move(ratios));
}

}  // namespace pqcached::bench

// Building an index on the device beside our build on the CPU; and the parts of a prefill.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <memory>
#include <numeric>
#include <span>
#include <thread>
#include <utility>

#include "kernels/cuda/kmeans.h"
#include "kernels/cuda/pack.h"
#include "kernels/train/kmeans.h"
#include "kernels/train/pq_encode.h"
#include "tests/gpu/bench/bench.h"
#include "tests/gpu/bench/matrix.h"

namespace pqcached::bench {
namespace {

using kernels::DType;
using kernels::PqGeometry;

constexpr uint32_t kHeads = 8;
constexpr PqGeometry kGeometry{128, 2, 6};
constexpr size_t kRowBytes = 512;
constexpr int kIterations = 10;
constexpr uint32_t kSubspaces = kHeads * 2;
constexpr uint32_t kSubspaceDim = 64;
constexpr uint32_t kCentroids = 64;

struct Rows {
  std::vector<std::byte> bytes;  // [head, token, kRowBytes]
  uint32_t tokens;

  const std::byte* Head(uint32_t head) const {
    return bytes.data() + size_t{head} * tokens * kRowBytes;
  }
};

Rows MakeRows(uint32_t tokens) {
  Rows rows = {std::vector<std::byte>(size_t{kHeads} * tokens * kRowBytes), tokens};
  const std::vector<std::byte> pattern = RandomHalfs(1.0f, 4);
  for (size_t at = 0; at < rows.bytes.size(); at += pattern.size()) {
    std::memcpy(rows.bytes.data() + at, pattern.data(),
                std::min(pattern.size(), rows.bytes.size() - at));
  }
  return rows;
}

// Builds of all heads and sub-spaces on the CPU, as many at once as there are cores.
class CpuBuild {
 public:
  explicit CpuBuild(const Rows& rows) : rows_(rows) {
    first_.resize(kSubspaces * kCentroids * kSubspaceDim);
    std::vector<std::byte> samples;
    for (uint32_t task = 0; task < kSubspaces; ++task) {
      kernels::KMeansInit(Load(task, DType::kF32, samples, Centroids(first_, task)), task);
    }
    trained_ = first_;
    planes_.resize(kHeads * kernels::CodePlanesBytes(kGeometry, rows.tokens));
  }

  const std::vector<float>& first() const { return first_; }
  // Before the last step, of all.
  double inertia() const { return std::accumulate(inertias_.begin(), inertias_.end(), 0.0); }

  double Time() {
    const auto begin = std::chrono::steady_clock::now();
    trained_ = first_;
    OnAllCores(kSubspaces, [this](uint32_t task) { Train(task); });
    OnAllCores(kHeads, [this](uint32_t head) { Encode(head); });
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  }

 private:
  static std::span<float> Centroids(std::vector<float>& all, uint32_t task) {
    constexpr size_t kCount = kCentroids * kSubspaceDim;
    return std::span(all).subspan(task * kCount, kCount);
  }

  template <typename Work>
  static void OnAllCores(uint32_t count, const Work& work) {
    std::vector<std::thread> threads;
    const uint32_t cores = std::max(1u, std::thread::hardware_concurrency());
    for (uint32_t core = 0; core < std::min(cores, count); ++core) {
      threads.emplace_back([&work, core, cores, count] {
        for (uint32_t i = core; i < count; i += cores) work(i);
      });
    }
    for (std::thread& thread : threads) thread.join();
  }

  kernels::KMeansProblem Load(uint32_t task, DType type, std::vector<std::byte>& samples,
                              std::span<float> centroids) const {
    samples.resize(size_t{rows_.tokens} * kSubspaceDim * kernels::DTypeBytes(type));
    kernels::KMeansLoad({}, {.source_type = DType::kF16,
                             .rows = rows_.Head(task / 2) + task % 2 * kSubspaceDim * 2,
                             .row_stride = kRowBytes,
                             .row_count = rows_.tokens,
                             .dim = kSubspaceDim,
                             .sample_type = type,
                             .samples = samples.data()});
    return {type, samples.data(), rows_.tokens, kSubspaceDim, kCentroids, centroids};
  }

  void Train(uint32_t task) {
    std::vector<std::byte> samples;
    const kernels::KMeansProblem problem =
        Load(task, kernels::KMeansSampleType({}), samples, Centroids(trained_, task));
    AlignedBytes scratch(kernels::KMeansStepScratchBytes(kSubspaceDim, kCentroids));
    for (int i = 0; i < kIterations; ++i) {
      inertias_[task] = kernels::KMeansStep({}, problem, scratch.span()).inertia;
    }
  }

  void Encode(uint32_t head) {
    AlignedBytes scratch(kernels::PqEncodeScratchBytes(kGeometry));
    const std::span<const float> centroids(
        trained_.data() + size_t{head} * kernels::CentroidFloats(kGeometry),
        kernels::CentroidFloats(kGeometry));
    kernels::PqEncode({},
                      {kGeometry, DType::kF16, rows_.Head(head), kRowBytes, rows_.tokens, centroids,
                       planes_.data() + head * kernels::CodePlanesBytes(kGeometry, rows_.tokens),
                       kernels::PlaneStride(rows_.tokens), 0, scratch.span()});
  }

  class AlignedBytes {
   public:
    explicit AlignedBytes(size_t bytes) : bytes_(bytes + 64), size_(bytes) {}
    std::span<std::byte> span() {
      const auto address = reinterpret_cast<uintptr_t>(bytes_.data());
      return std::span(bytes_).subspan((64 - address % 64) % 64, size_);
    }

   private:
    std::vector<std::byte> bytes_;
    size_t size_;
  };

  const Rows& rows_;
  std::vector<float> first_;
  std::vector<float> trained_;
  std::vector<double> inertias_ = std::vector<double>(kSubspaces);
  std::vector<uint8_t> planes_;
};

// The same on the device, with the rows there.
class GpuBuild {
 public:
  GpuBuild(const Rows& rows, const std::vector<float>& first)
      : tokens_(rows.tokens),
        rows_(rows.bytes),
        first_(first),
        centroids_(first),
        planes_(kHeads * kernels::CodePlanesBytes(kGeometry, rows.tokens)),
        stats_(kSubspaces),
        scratch_(kernels::cuda::KMeansStepScratchBytes(rows.tokens, kCentroids, kSubspaces)) {
    std::vector<kernels::cuda::KMeansTask> tasks;
    std::vector<kernels::cuda::EncodeTask> encode;
    for (uint32_t task = 0; task < kSubspaces; ++task) {
      tasks.push_back({rows_.data() + size_t{task / 2} * tokens_ * kRowBytes +
                           size_t{task % 2} * kSubspaceDim * 2,
                       centroids_.data() + size_t{task} * kCentroids * kSubspaceDim});
    }
    for (uint32_t head = 0; head < kHeads; ++head) {
      encode.push_back(
          {.rows = rows_.data() + size_t{head} * tokens_ * kRowBytes,
           .centroids = centroids_.data() + size_t{head} * kernels::CentroidFloats(kGeometry),
           .planes = planes_.data() + head * kernels::CodePlanesBytes(kGeometry, tokens_),
           .plane_stride = kernels::PlaneStride(tokens_),
           .row_count = tokens_});
    }
    tasks_ = std::make_unique<DeviceArray<kernels::cuda::KMeansTask>>(tasks);
    encode_tasks_ = std::make_unique<DeviceArray<kernels::cuda::EncodeTask>>(encode);
  }

  void Give(cudaStream_t stream) const {
    Check(cudaMemcpyAsync(centroids_.data(), first_.data(), first_.bytes(),
                          cudaMemcpyDeviceToDevice, stream),
          "copying centroids");
    for (int i = 0; i < kIterations; ++i) {
      Check(kernels::cuda::KMeansStep({.dtype = DType::kF16,
                                       .row_stride_bytes = kRowBytes,
                                       .sample_count = tokens_,
                                       .dim = kSubspaceDim,
                                       .centroid_count = kCentroids,
                                       .task_count = kSubspaces,
                                       .tasks = tasks_->data(),
                                       .stats = stats_.data(),
                                       .scratch = scratch_.data(),
                                       .scratch_bytes = scratch_.bytes()},
                                      stream),
            "a step of k-means");
    }
    Check(kernels::cuda::PqEncode({.geometry = kGeometry,
                                   .dtype = DType::kF16,
                                   .row_stride_bytes = kRowBytes,
                                   .row_capacity = tokens_,
                                   .task_capacity = kHeads,
                                   .tasks = encode_tasks_->data()},
                                  stream),
          "encoding");
  }

  double Inertia() const {
    double sum = 0.0;
    for (const kernels::cuda::KMeansStats& stats : stats_.Get()) sum += stats.inertia;
    return sum;
  }

 private:
  uint32_t tokens_;
  DeviceArray<std::byte> rows_;
  DeviceArray<float> first_;
  DeviceArray<float> centroids_;
  DeviceArray<uint8_t> planes_;
  DeviceArray<kernels::cuda::KMeansStats> stats_;
  DeviceArray<std::byte> scratch_;
  std::unique_ptr<DeviceArray<kernels::cuda::KMeansTask>> tasks_;
  std::unique_ptr<DeviceArray<kernels::cuda::EncodeTask>> encode_tasks_;
};

void BenchKMeans(Bench& bench) {
  const Rows rows = MakeRows(bench.Size(128u << 10, 200u));
  CpuBuild cpu(rows);
  const GpuBuild device(rows, cpu.first());
  DeviceRounds rounds(bench.stream);
  const size_t on_device = rounds.Add("build on the device", 1,
                                      [&](cudaStream_t stream, uint32_t) { device.Give(stream); });
  const size_t on_cpu = rounds.AddTimed("build on the CPU", [&] { return cpu.Time(); });
  rounds.Run(std::min(bench.rounds, 5));
  // From the same first centroids; samples are rounded differently.
  Require(std::abs(device.Inertia() / cpu.inertia() - 1.0) < 0.01, "k-means on the device");
  bench.add("gpu_kmeans_vs_cpu", rounds.Ratio(on_cpu, on_device));
  Stat milliseconds = rounds.Seconds(on_device);
  milliseconds.median *= 1e3;
  milliseconds.spread *= 1e3;
  bench.add("gpu_prefill_layer_kmeans_ms", milliseconds);
}

void BenchPrefill(Bench& bench) {
  const uint32_t tokens = bench.Size(8192u, 16u);
  const uint32_t hidden = bench.Size(4096u, 64u);
  const uint32_t ffn = bench.Size(14336u, 96u);
  const uint32_t kv = kHeads * 128;
  gpu::PinnedBuffer staging;
  Check(staging.Allocate(size_t{tokens} * kHeads * kRowBytes));
  const DeviceArray<std::byte> key_values(size_t{tokens} * kv * 2 * 2);
  Repeat(key_values.data(), key_values.bytes(), RandomHalfs(1.0f, 5));
  const kernels::cuda::PackRowsArgs pack = {
      .token_count = tokens,
      .head_count = kHeads,
      .key_dim = 128,
      .value_dim = 128,
      .key = {.data = key_values.data(), .token_stride = kv, .head_stride = 128},
      .value = {.data = key_values.data() + size_t{tokens} * kv * 2,
                .token_stride = kv,
                .head_stride = 128},
      .rows = static_cast<std::byte*>(staging.data()),
      .head_stride_bytes = tokens * kRowBytes,
      .row_stride_bytes = kRowBytes};
  Matrix matrix;
  const DeviceArray<std::byte> x(size_t{tokens} * std::max(hidden, ffn) * 2);
  const DeviceArray<std::byte> y(size_t{tokens} * 2 * ffn * 2);
  const DeviceArray<std::byte> weight(size_t{hidden} * 2 * ffn * 2);
  Repeat(x.data(), x.bytes(), RandomHalfs(0.1f, 6));
  Repeat(weight.data(), weight.bytes(), RandomHalfs(0.02f, 7));
  DeviceRounds rounds(bench.stream);
  const size_t packed = rounds.Add("pack", 1, [&](cudaStream_t stream, uint32_t) {
    Check(kernels::cuda::PackRows(pack, stream), "packing");
  });
  const size_t linear = rounds.Add("matrix products", 1, [&](cudaStream_t stream, uint32_t) {
    const std::pair<uint32_t, uint32_t> products[] = {{hidden, hidden + 2 * std::min(kv, hidden)},
                                                      {hidden, hidden},
                                                      {hidden, 2 * ffn},
                                                      {ffn, hidden}};
    for (const auto& [in, out] : products) {
      matrix.Give(stream, {x.data(), weight.data(), y.data(), tokens, in, out, false});
    }
  });
  rounds.Run(bench.rounds);
  const auto in_ms = [&](size_t entry) {
    Stat stat = rounds.Seconds(entry);
    stat.median *= 1e3;
    stat.spread *= 1e3;
    return stat;
  };
  bench.add("gpu_prefill_layer_pack_ms", in_ms(packed));
  bench.add("gpu_prefill_layer_linear_ms", in_ms(linear));
}

}  // namespace

void BenchBuild(Bench& bench) {
  BenchKMeans(bench);
  BenchPrefill(bench);
}

}  // namespace pqcached::bench

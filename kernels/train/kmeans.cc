#include "kernels/train/kmeans.h"

#include <algorithm>
#include <cmath>

#include "kernels/base/check.h"
#include "kernels/base/sample_load.h"
#include "kernels/base/scratch_cutter.h"
#include "kernels/train/nearest_prepare.h"

namespace pqcached::kernels {
namespace {

constexpr uint32_t kMaxCentroidCount = 256;

// Number of samples that are summed in float before the sum is added to a double: a cluster may
// contain millions.
constexpr uint32_t kFlushSamples = 8 * kNearestBlock;

// Distances below this share of |sample|^2 are rounding errors.
constexpr float kDistanceNoise = 1e-6f;

// splitmix64, so that a seed gives the same numbers on every platform.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}

  uint64_t Next() {
    state_ += 0x9E3779B97F4A7C15u;
    uint64_t z = state_;
    z = (z ^ (z >> 30u)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27u)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31u);
  }

 private:
  uint64_t state_;
};

void CheckProblem(const KMeansProblem& problem) {
  const uint32_t count = problem.centroid_count;
  PQC_CHECK(count >= 2 && count <= kMaxCentroidCount && (count & (count - 1)) == 0);
  PQC_CHECK(problem.dim >= 1);
  PQC_CHECK(problem.centroids.size() == size_t{count} * problem.dim);
  PQC_CHECK(problem.sample_type == DType::kF32 || problem.sample_type == DType::kBf16);
}

void LoadSample(const KMeansProblem& problem, uint32_t sample, float* out) {
  const size_t sample_bytes = problem.dim * DTypeBytes(problem.sample_type);
  ConvertElements(problem.sample_type, problem.samples + sample * sample_bytes, DType::kF32,
                  reinterpret_cast<std::byte*>(out), problem.dim);
}

struct Farthest {
  float distance = 0.0f;
  uint32_t sample = 0;
};

// Sums that one pass computes, per cluster.
struct Clusters {
  std::span<float> block_sums;   // [centroid_count, dim], sums since the last flush
  std::span<double> sums;        // [centroid_count, dim]
  std::span<uint32_t> counts;    // [centroid_count]
  std::span<Farthest> farthest;  // [centroid_count]
  double inertia = 0.0;
};

void Flush(Clusters& clusters) {
  for (size_t i = 0; i < clusters.sums.size(); ++i) {
    clusters.sums[i] += double{clusters.block_sums[i]};
    clusters.block_sums[i] = 0.0f;
  }
}

// Assignment of a block of samples to clusters.
struct Assigned {
  uint32_t first_sample = 0;
  uint32_t count = 0;
  uint8_t codes[kNearestBlock];
  float scores[kNearestBlock];
  float norms[kNearestBlock];  // |sample|^2
};

void Collect(const Assigned& assigned, Clusters& clusters) {
  for (uint32_t s = 0; s < assigned.count; ++s) {
    const uint32_t code = assigned.codes[s];
    float distance = assigned.norms[s] - 2 * assigned.scores[s];
    if (!(distance > kDistanceNoise * assigned.norms[s])) distance = 0.0f;
    ++clusters.counts[code];
    clusters.inertia += double{distance};
    if (distance > clusters.farthest[code].distance) {
      clusters.farthest[code] = {.distance = distance, .sample = assigned.first_sample + s};
    }
  }
}

// Moves every centroid to its mean, and empty clusters to far samples.
KMeansStats Move(const KMeansProblem& problem, Clusters& clusters) {
  KMeansStats stats;
  stats.inertia = clusters.inertia;
  const uint32_t dim = problem.dim;
  for (uint32_t c = 0; c < problem.centroid_count; ++c) {
    if (clusters.counts[c] == 0) continue;
    for (uint32_t i = 0; i < dim; ++i) {
      const double mean = clusters.sums[size_t{c} * dim + i] / clusters.counts[c];
      problem.centroids[size_t{c} * dim + i] = static_cast<float>(mean);
    }
  }
  for (uint32_t c = 0; c < problem.centroid_count; ++c) {
    if (clusters.counts[c] != 0) continue;
    ++stats.empty_count;
    const auto farthest = std::max_element(
        clusters.farthest.begin(), clusters.farthest.end(),
        [](const Farthest& a, const Farthest& b) { return a.distance < b.distance; });
    if (farthest->distance <= 0.0f) continue;
    LoadSample(problem, farthest->sample, problem.centroids.data() + size_t{c} * dim);
    farthest->distance = 0.0f;
    ++stats.reseeded_count;
  }
  return stats;
}

}  // namespace

DType KMeansSampleType(const Exec& exec) {
  return NearestOpsFor(exec).find_bf16 != nullptr ? DType::kBf16 : DType::kF32;
}

void KMeansLoad(const Exec& exec, const KMeansLoadArgs& args) {
  LoadSamples(exec, {.source_type = args.source_type,
                     .rows = args.rows,
                     .row_stride = args.row_stride,
                     .row_count = args.row_count,
                     .dim = args.dim,
                     .pair_offset_bytes = args.pair_offset_bytes,
                     .sample_type = args.sample_type,
                     .samples = args.samples});
}

void KMeansInit(const KMeansProblem& problem, uint64_t seed) {
  CheckProblem(problem);
  const uint32_t sample_count = problem.sample_count;
  const uint32_t drawn_count = std::min(problem.centroid_count, sample_count);
  if (drawn_count == 0) {
    std::fill(problem.centroids.begin(), problem.centroids.end(), 0.0f);
    return;
  }
  // Floyd's algorithm draws distinct numbers; the set is small enough for a linear search.
  Random random(seed);
  uint32_t drawn[kMaxCentroidCount];
  for (uint32_t i = 0; i < drawn_count; ++i) {
    const uint32_t limit = sample_count - drawn_count + i;
    const auto candidate = static_cast<uint32_t>(random.Next() % (uint64_t{limit} + 1));
    const bool taken = std::find(drawn, drawn + i, candidate) != drawn + i;
    drawn[i] = taken ? limit : candidate;
  }
  for (uint32_t c = 0; c < problem.centroid_count; ++c) {
    LoadSample(problem, drawn[c % drawn_count], problem.centroids.data() + size_t{c} * problem.dim);
  }
}

size_t KMeansStepScratchBytes(uint32_t dim, uint32_t centroid_count) {
  const size_t floats = size_t{dim} * centroid_count;
  return ScratchAligned(floats * sizeof(float)) + ScratchAligned(floats * sizeof(double)) +
         ScratchAligned(centroid_count * sizeof(uint32_t)) +
         ScratchAligned(centroid_count * sizeof(Farthest)) +
         ScratchAligned(size_t{kNearestBlock} * dim * sizeof(float)) +
         NearestScratchBytes(dim, centroid_count);
}

KMeansStats KMeansStep(const Exec& exec, const KMeansProblem& problem,
                       std::span<std::byte> scratch) {
  CheckProblem(problem);
  const uint32_t dim = problem.dim;
  ScratchCutter cutter(scratch);
  Clusters clusters;
  clusters.block_sums = cutter.Take<float>(problem.centroids.size());
  clusters.sums = cutter.Take<double>(problem.centroids.size());
  clusters.counts = cutter.Take<uint32_t>(problem.centroid_count);
  clusters.farthest = cutter.Take<Farthest>(problem.centroid_count);
  const std::span<float> block = cutter.Take<float>(size_t{kNearestBlock} * dim);
  const NearestOps ops = NearestOpsFor(exec);
  const bool bf16 =
      problem.sample_type == DType::kBf16 && ops.find_bf16 != nullptr && dim % ops.bf16_dims == 0;
  const NearestCentroids nearest =
      PrepareNearest(problem.centroids, dim, bf16 ? ops.pair_form : PairForm::kNone,
                     cutter.Take<std::byte>(NearestScratchBytes(dim, problem.centroid_count)));
  std::fill(clusters.block_sums.begin(), clusters.block_sums.end(), 0.0f);
  std::fill(clusters.sums.begin(), clusters.sums.end(), 0.0);
  std::fill(clusters.counts.begin(), clusters.counts.end(), 0u);
  std::fill(clusters.farthest.begin(), clusters.farthest.end(), Farthest{});

  const size_t sample_bytes = dim * DTypeBytes(problem.sample_type);
  Assigned assigned;
  for (uint32_t first = 0; first < problem.sample_count; first += kNearestBlock) {
    const uint32_t count = std::min(kNearestBlock, problem.sample_count - first);
    assigned.first_sample = first;
    assigned.count = count;
    const std::byte* raw = problem.samples + first * sample_bytes;
    if (bf16) {
      const auto* samples = reinterpret_cast<const uint16_t*>(raw);
      ops.find_bf16(nearest, samples, count, reinterpret_cast<int16_t*>(block.data()),
                    assigned.codes, assigned.scores);
      ops.add_bf16(dim, samples, count, assigned.codes, clusters.block_sums.data(), assigned.norms);
    } else {
      const float* samples = reinterpret_cast<const float*>(raw);
      if (problem.sample_type != DType::kF32) {
        LoadSamples(exec, {.source_type = problem.sample_type,
                           .rows = raw,
                           .row_stride = sample_bytes,
                           .row_count = count,
                           .dim = dim,
                           .sample_type = DType::kF32,
                           .samples = reinterpret_cast<std::byte*>(block.data())});
        samples = block.data();
      }
      ops.find(nearest, samples, count, assigned.codes, assigned.scores);
      ops.add(dim, samples, count, assigned.codes, clusters.block_sums.data(), assigned.norms);
    }
    Collect(assigned, clusters);
    if ((first + count) % kFlushSamples == 0) Flush(clusters);
  }
  Flush(clusters);
  return Move(problem, clusters);
}

}  // namespace pqcached::kernels

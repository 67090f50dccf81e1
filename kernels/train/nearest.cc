#include "kernels/train/nearest.h"

#include <algorithm>
#include <limits>

#include "kernels/base/check.h"
#include "kernels/base/dtype.h"
#include "kernels/base/scratch_cutter.h"
#include "kernels/train/nearest_prepare.h"

namespace pqcached::kernels {
namespace {

// Score of a centroid that only fills a vector.
constexpr float kNeverNearest = -std::numeric_limits<float>::infinity();

// The specification.
uint32_t FindOneReference(const float* rows, uint32_t count, uint32_t dim, const float* sample) {
  uint32_t nearest = 0;
  double least = 0.0;
  for (uint32_t c = 0; c < count; ++c) {
    double distance = 0.0;
    for (uint32_t i = 0; i < dim; ++i) {
      const double difference = double{sample[i]} - rows[size_t{c} * dim + i];
      distance += difference * difference;
    }
    if (c == 0 || distance < least) {
      least = distance;
      nearest = c;
    }
  }
  return nearest;
}

void FindReference(const NearestCentroids& centroids, const float* samples, uint32_t sample_count,
                   uint8_t* codes, float* scores) {
  for (uint32_t s = 0; s < sample_count; ++s) {
    const float* sample = samples + size_t{s} * centroids.dim;
    const uint32_t code =
        FindOneReference(centroids.rows, centroids.row_count, centroids.dim, sample);
    double score = 0.0;
    for (uint32_t i = 0; i < centroids.dim; ++i) {
      const double entry = centroids.rows[size_t{code} * centroids.dim + i];
      score += (sample[i] - entry / 2) * entry;
    }
    codes[s] = static_cast<uint8_t>(code);
    scores[s] = static_cast<float>(score);
  }
}

void AddReference(uint32_t dim, const float* samples, uint32_t sample_count, const uint8_t* codes,
                  float* sums, float* norms) {
  for (uint32_t s = 0; s < sample_count; ++s) {
    norms[s] = 0.0f;
    for (uint32_t i = 0; i < dim; ++i) {
      const float x = samples[size_t{s} * dim + i];
      sums[size_t{codes[s]} * dim + i] += x;
      norms[s] += x * x;
    }
  }
}

constexpr uint32_t kCentroidsAtOnce = 16;

// Returns the number of centroids with those that fill the last vector.
uint32_t PaddedCount(uint32_t count) {
  return (count + kCentroidsAtOnce - 1) / kCentroidsAtOnce * kCentroidsAtOnce;
}

// Fills in what FindBf16 reads of the centroids; `pairs` and `bias` have room for the padding.
void FillPairs(std::span<const float> rows, uint32_t dim, std::span<uint32_t> pairs,
               std::span<float> bias) {
  const size_t count = bias.size();
  std::fill(pairs.begin(), pairs.end(), 0u);
  std::fill(bias.begin(), bias.end(), kNeverNearest);
  for (size_t c = 0; c < rows.size() / dim; ++c) {
    float norm = 0.0f;
    for (uint32_t i = 0; i < dim; i += 2) {
      const uint32_t low = F32ToBf16(rows[c * dim + i]);
      const uint32_t high = F32ToBf16(rows[c * dim + i + 1]);
      pairs[i / 2 * count + c] = low | high << 16u;
      const float x = Bf16ToF32(static_cast<uint16_t>(low));
      const float y = Bf16ToF32(static_cast<uint16_t>(high));
      norm += x * x + y * y;
    }
    bias[c] = -0.5f * norm;
  }
}

}  // namespace

const NearestOps kNearestReference = {.find = FindReference,
                                      .find_bf16 = nullptr,
                                      .find_one = FindOneReference,
                                      .add = AddReference,
                                      .add_bf16 = nullptr};

NearestOps NearestOpsFor(const Exec& exec) {
  if (exec.level == Level::kReference) return kNearestReference;
#if defined(PQCACHED_X86)
  if (exec.level >= Level::kAvx512Bf16) {
    NearestOps ops = kNearestAvx512;
    ops.find_bf16 = kNearestAvx512Bf16.find_bf16;
    ops.add_bf16 = kNearestAvx512Bf16.add_bf16;
    return ops;
  }
  if (exec.level >= Level::kAvx512) return kNearestAvx512;
  if (exec.level >= Level::kAvx2) return kNearestAvx2;
#endif
  return kNearestPortable;
}

size_t NearestScratchBytes(uint32_t dim, uint32_t row_count) {
  const uint32_t count = PaddedCount(row_count);
  return ScratchAligned(size_t{dim} * count * sizeof(float)) +
         2 * ScratchAligned(count * sizeof(float)) +
         ScratchAligned(size_t{dim / 2} * count * sizeof(uint32_t));
}

NearestCentroids PrepareNearest(std::span<const float> centroids, uint32_t dim, bool with_pairs,
                                std::span<std::byte> scratch) {
  const auto row_count = static_cast<uint32_t>(centroids.size() / dim);
  const uint32_t count = PaddedCount(row_count);
  PQC_CHECK(count <= 256 && centroids.size() == size_t{row_count} * dim);
  PQC_CHECK(!with_pairs || dim % 2 == 0);
  ScratchCutter cutter(scratch);
  const std::span<float> columns = cutter.Take<float>(size_t{dim} * count);
  const std::span<float> bias = cutter.Take<float>(count);
  std::fill(columns.begin(), columns.end(), 0.0f);
  std::fill(bias.begin(), bias.end(), kNeverNearest);
  for (uint32_t c = 0; c < row_count; ++c) {
    float norm = 0.0f;
    for (uint32_t i = 0; i < dim; ++i) {
      const float x = centroids[size_t{c} * dim + i];
      columns[size_t{i} * count + c] = x;
      norm += x * x;
    }
    bias[c] = -0.5f * norm;
  }
  const std::span<float> pair_bias = cutter.Take<float>(count);
  const std::span<uint32_t> pairs = cutter.Take<uint32_t>(size_t{dim / 2} * count);
  if (with_pairs) FillPairs(centroids, dim, pairs, pair_bias);
  return {.dim = dim,
          .count = count,
          .row_count = row_count,
          .rows = centroids.data(),
          .columns = columns.data(),
          .bias = bias.data(),
          .pairs = with_pairs ? pairs.data() : nullptr,
          .pair_bias = pair_bias.data()};
}

}  // namespace pqcached::kernels

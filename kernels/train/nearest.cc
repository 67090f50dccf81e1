#include "kernels/train/nearest.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/base/check.h"
#include "kernels/base/dtype.h"
#include "kernels/base/scratch_cutter.h"
#include "kernels/train/nearest_prepare.h"

namespace pqcached::kernels {
namespace {

// Score of a centroid that only fills a vector.
constexpr float kNeverNearest = -std::numeric_limits<float>::infinity();

// Least magnitude by which integers are scaled: quotients by smaller ones could be infinite.
constexpr float kLeastMagnitude = 1e-30f;

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

// What find_bf16 reads of the centroids; the spans have room for the padding.
struct Pairs {
  std::span<uint32_t> entries;
  std::span<float> bias;
  std::span<float> scale;
};

void FillBf16(std::span<const float> rows, uint32_t dim, const Pairs& pairs) {
  const size_t count = pairs.bias.size();
  for (size_t c = 0; c < rows.size() / dim; ++c) {
    float norm = 0.0f;
    for (uint32_t i = 0; i < dim; i += 2) {
      const uint32_t low = F32ToBf16(rows[c * dim + i]);
      const uint32_t high = F32ToBf16(rows[c * dim + i + 1]);
      pairs.entries[i / 2 * count + c] = low | high << 16u;
      const float x = Bf16ToF32(static_cast<uint16_t>(low));
      const float y = Bf16ToF32(static_cast<uint16_t>(high));
      norm += x * x + y * y;
    }
    pairs.bias[c] = -0.5f * norm;
  }
}

uint32_t Int16Limit(uint32_t dim) {
  const double limit = std::floor(std::sqrt(double{0x7FFFFFFF} / dim));
  return static_cast<uint32_t>(std::min(limit, 32767.0));
}

void FillInt16(std::span<const float> rows, uint32_t dim, const Pairs& pairs) {
  const size_t count = pairs.bias.size();
  const auto limit = static_cast<float>(Int16Limit(dim));
  std::fill(pairs.scale.begin(), pairs.scale.end(), 0.0f);
  for (size_t c = 0; c < rows.size() / dim; ++c) {
    const float* const row = rows.data() + c * dim;
    float largest = 0.0f;
    for (uint32_t i = 0; i < dim; ++i) largest = std::max(largest, std::fabs(row[i]));
    const float scale = std::max(largest, kLeastMagnitude) / limit;
    float norm = 0.0f;
    for (uint32_t i = 0; i < dim; i += 2) {
      const float x = std::nearbyint(row[i] / scale);
      const float y = std::nearbyint(row[i + 1] / scale);
      const auto low = static_cast<uint16_t>(static_cast<int16_t>(x));
      const auto high = static_cast<uint16_t>(static_cast<int16_t>(y));
      pairs.entries[i / 2 * count + c] = uint32_t{low} | uint32_t{high} << 16u;
      norm += x * scale * (x * scale) + y * scale * (y * scale);
    }
    pairs.bias[c] = -0.5f * norm;
    pairs.scale[c] = scale;
  }
}

// Fills in what find_bf16 reads of the centroids.
void FillPairs(PairForm form, std::span<const float> rows, uint32_t dim, const Pairs& pairs) {
  std::fill(pairs.entries.begin(), pairs.entries.end(), 0u);
  std::fill(pairs.bias.begin(), pairs.bias.end(), kNeverNearest);
  if (form == PairForm::kBf16) return FillBf16(rows, dim, pairs);
  FillInt16(rows, dim, pairs);
}

}  // namespace

const NearestOps kNearestReference = {.find = FindReference,
                                      .find_bf16 = nullptr,
                                      .find_one = FindOneReference,
                                      .add = AddReference,
                                      .add_bf16 = nullptr,
                                      .pair_form = PairForm::kNone,
                                      .bf16_dims = 0};

NearestOps NearestOpsFor(const Exec& exec) {
  if (exec.level == Level::kReference) return kNearestReference;
#if defined(PQCACHED_X86)
  if (exec.level >= Level::kAvx512Bf16) {
    NearestOps ops = kNearestAvx512;
    ops.find_bf16 = kNearestAvx512Bf16.find_bf16;
    ops.add_bf16 = kNearestAvx512Bf16.add_bf16;
    ops.pair_form = kNearestAvx512Bf16.pair_form;
    ops.bf16_dims = kNearestAvx512Bf16.bf16_dims;
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
         3 * ScratchAligned(count * sizeof(float)) +
         ScratchAligned(size_t{dim / 2} * count * sizeof(uint32_t));
}

NearestCentroids PrepareNearest(std::span<const float> centroids, uint32_t dim, PairForm pair_form,
                                std::span<std::byte> scratch) {
  const auto row_count = static_cast<uint32_t>(centroids.size() / dim);
  const uint32_t count = PaddedCount(row_count);
  PQC_CHECK(count <= 256 && centroids.size() == size_t{row_count} * dim);
  const bool with_pairs = pair_form != PairForm::kNone;
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
  const std::span<float> pair_scale = cutter.Take<float>(count);
  if (with_pairs) {
    FillPairs(pair_form, centroids, dim,
              {.entries = pairs, .bias = pair_bias, .scale = pair_scale});
  }
  return {.dim = dim,
          .count = count,
          .row_count = row_count,
          .rows = centroids.data(),
          .columns = columns.data(),
          .bias = bias.data(),
          .pairs = with_pairs ? pairs.data() : nullptr,
          .pair_bias = pair_bias.data(),
          .pair_scale = pair_scale.data(),
          .int16_limit = Int16Limit(dim)};
}

}  // namespace pqcached::kernels

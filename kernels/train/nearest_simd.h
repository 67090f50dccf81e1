// Nearest centroids, written once for every Vec: tiles of samples by centroids whose sums stay in
// registers. This hides the latency of the multiplications and loads each register of centroids
// once for several samples.
//
// The parameter `Product` defines how samples and centroids are multiplied; F32Product works on
// every instruction set. Include after one of simd_*.h; everything is local to the including file.
#ifndef PQCACHED_KERNELS_TRAIN_NEAREST_SIMD_H_
#define PQCACHED_KERNELS_TRAIN_NEAREST_SIMD_H_

#include <cstddef>
#include <cstdint>

#include "kernels/train/nearest.h"

namespace pqcached::kernels {
namespace {

struct F32Product {
  using Sample = float;
  static constexpr uint32_t kStep = 1;  // dims per product

  const float* columns;
  const float* bias;

  PQC_INLINE Vec::F Broadcast(const float* sample) { return Vec::Set(*sample); }
  PQC_INLINE Vec::F Add(Vec::F sum, Vec::F centroid, Vec::F sample) {
    return Vec::MulAdd(centroid, sample, sum);
  }
};

// Compares kSamples samples with kVectors registers of centroids from `first` on.
template <uint32_t kVectors, uint32_t kSamples, typename Product>
inline void FindTile(const Product& product, const NearestCentroids& centroids, uint32_t first,
                     const typename Product::Sample* samples, uint8_t* codes, float* scores) {
  using F = Vec::F;
  F sums[kSamples][kVectors];
  for (uint32_t v = 0; v < kVectors; ++v) {
    const F bias = Vec::Load(product.bias + first + v * Vec::kLanes);
    for (uint32_t s = 0; s < kSamples; ++s) sums[s][v] = bias;
  }
  const float* column = product.columns + first;
  for (uint32_t i = 0; i < centroids.dim; i += Product::kStep, column += centroids.count) {
    F column_part[kVectors];
    for (uint32_t v = 0; v < kVectors; ++v) column_part[v] = Vec::Load(column + v * Vec::kLanes);
    for (uint32_t s = 0; s < kSamples; ++s) {
      const F sample = Product::Broadcast(samples + size_t{s} * centroids.dim + i);
      for (uint32_t v = 0; v < kVectors; ++v) {
        sums[s][v] = Product::Add(sums[s][v], column_part[v], sample);
      }
    }
  }
  for (uint32_t s = 0; s < kSamples; ++s) {
    F largest = sums[s][0];
    for (uint32_t v = 1; v < kVectors; ++v) largest = Vec::Max(largest, sums[s][v]);
    const float score = Vec::Largest(largest);
    uint64_t equal = 0;
    for (uint32_t v = 0; v < kVectors; ++v) {
      equal |= uint64_t{Vec::EqualMask(sums[s][v], Vec::Set(score))} << (v * Vec::kLanes);
    }
    // No bit is set only when scores are NaN, which finite samples cannot cause.
    const uint32_t code = equal == 0 ? 0u : static_cast<uint32_t>(__builtin_ctzll(equal));
    if (first != 0 && !(score > scores[s])) continue;
    scores[s] = score;
    codes[s] = static_cast<uint8_t>(first + code);
  }
}

template <uint32_t kVectors, uint32_t kSamples, typename Product>
inline void FindTiles(const Product& product, const NearestCentroids& centroids,
                      const typename Product::Sample* samples, uint32_t sample_count,
                      uint8_t* codes, float* scores) {
  for (uint32_t first = 0; first < centroids.count; first += kVectors * Vec::kLanes) {
    uint32_t s = 0;
    for (; s + kSamples <= sample_count; s += kSamples) {
      FindTile<kVectors, kSamples>(product, centroids, first, samples + size_t{s} * centroids.dim,
                                   codes + s, scores + s);
    }
    for (; s < sample_count; ++s) {
      FindTile<kVectors, 1>(product, centroids, first, samples + size_t{s} * centroids.dim,
                            codes + s, scores + s);
    }
  }
}

// Implements NearestOps::find with 24 sums in 32 registers, or 12 in 16.
template <typename Product>
inline void FindTiled(const Product& product, const NearestCentroids& centroids,
                      const typename Product::Sample* samples, uint32_t sample_count,
                      uint8_t* codes, float* scores) {
  if constexpr (Vec::kLanes < 16) {
    FindTiles<2, 6>(product, centroids, samples, sample_count, codes, scores);
  } else if (centroids.count % 64 == 0) {
    FindTiles<4, 6>(product, centroids, samples, sample_count, codes, scores);
  } else if (centroids.count % 32 == 0) {
    FindTiles<2, 12>(product, centroids, samples, sample_count, codes, scores);
  } else {
    FindTiles<1, 24>(product, centroids, samples, sample_count, codes, scores);
  }
}

inline void FindF32(const NearestCentroids& centroids, const float* samples, uint32_t sample_count,
                    uint8_t* codes, float* scores) {
  FindTiled(F32Product{centroids.columns, centroids.bias}, centroids, samples, sample_count, codes,
            scores);
}

inline uint32_t FindOne(const float* rows, uint32_t count, uint32_t dim, const float* sample) {
  uint32_t nearest = 0;
  float least = 0.0f;
  for (uint32_t c = 0; c < count; ++c) {
    const float* row = rows + size_t{c} * dim;
    Vec::F sum = Vec::Set(0.0f);
    uint32_t i = 0;
    for (; i + Vec::kLanes <= dim; i += Vec::kLanes) {
      const Vec::F difference = Vec::Load(sample + i) - Vec::Load(row + i);
      sum = Vec::MulAdd(difference, difference, sum);
    }
    if (i + 8 <= dim) {
      const Vec::F difference =
          Vec::LoadRowHalf<DType::kF32>(reinterpret_cast<const std::byte*>(sample), i) -
          Vec::LoadRowHalf<DType::kF32>(reinterpret_cast<const std::byte*>(row), i);
      sum = Vec::MulAdd(difference, difference, sum);
      i += 8;
    }
    float distance = Vec::Sum(sum);
    for (; i < dim; ++i) distance += (sample[i] - row[i]) * (sample[i] - row[i]);
    if (c == 0 || distance < least) {
      least = distance;
      nearest = c;
    }
  }
  return nearest;
}

PQC_INLINE float Widen(float element) { return element; }
PQC_INLINE float Widen(uint16_t element) { return Bf16ToF32(element); }

// Implements NearestOps::add for samples of fp32 or bf16.
template <typename Sample>
inline void AddSamples(uint32_t dim, const Sample* samples, uint32_t sample_count,
                       const uint8_t* codes, float* sums, float* norms) {
  constexpr DType kType = sizeof(Sample) == sizeof(float) ? DType::kF32 : DType::kBf16;
  for (uint32_t s = 0; s < sample_count; ++s) {
    const Sample* sample = samples + size_t{s} * dim;
    const std::byte* row = reinterpret_cast<const std::byte*>(sample);
    float* sum = sums + size_t{codes[s]} * dim;
    Vec::F squares = Vec::Set(0.0f);
    uint32_t i = 0;
    for (; i + Vec::kLanes <= dim; i += Vec::kLanes) {
      const Vec::F x = Vec::LoadRow<kType>(row, i);
      Vec::Store(sum + i, Vec::Load(sum + i) + x);
      squares = Vec::MulAdd(x, x, squares);
    }
    if (i + 8 <= dim) {
      const Vec::F x = Vec::LoadRowHalf<kType>(row, i);
      float lanes[Vec::kLanes];
      Vec::Store(lanes, x);
      for (uint32_t j = 0; j < 8 && j < Vec::kLanes; ++j) sum[i + j] += lanes[j];
      squares = Vec::MulAdd(x, x, squares);
      i += 8;
    }
    float norm = Vec::Sum(squares);
    for (; i < dim; ++i) {
      const float x = Widen(sample[i]);
      sum[i] += x;
      norm += x * x;
    }
    norms[s] = norm;
  }
}

}  // namespace
}  // namespace pqcached::kernels

#endif  // PQCACHED_KERNELS_TRAIN_NEAREST_SIMD_H_

// FindTiled: the tiles of nearest_avx512.cc and nearest_avx512bf16.cc. For files that are compiled
// for AVX-512 only; in an anonymous namespace, so that no copy leaves them.
#ifndef PQCACHED_KERNELS_NEAREST_TILE_AVX512_H_
#define PQCACHED_KERNELS_NEAREST_TILE_AVX512_H_

#include <immintrin.h>

#include "kernels/nearest.h"

namespace pqcached::kernels {
namespace {

// kSamples samples against kVectors * 16 centroids from first_centroid on.
template <uint32_t kVectors, uint32_t kSamples, typename Product>
inline void FindTile(const Product& product, uint32_t dim, uint32_t centroid_count,
                     uint32_t first_centroid, const typename Product::Sample* samples,
                     uint8_t* codes, float* scores) {
  __m512 sums[kSamples][kVectors];
  for (uint32_t v = 0; v < kVectors; ++v) {
    const __m512 bias = product.Bias(first_centroid + v * 16);
    for (uint32_t s = 0; s < kSamples; ++s) sums[s][v] = bias;
  }
  size_t index = first_centroid;
  for (uint32_t i = 0; i < dim; i += Product::kStep) {
    __m512 centroids[kVectors];
    for (uint32_t v = 0; v < kVectors; ++v) centroids[v] = product.Load(index + v * 16);
    for (uint32_t s = 0; s < kSamples; ++s) {
      const __m512 sample = Product::Broadcast(samples + size_t{s} * dim + i);
      for (uint32_t v = 0; v < kVectors; ++v) {
        sums[s][v] = Product::Add(sums[s][v], centroids[v], sample);
      }
    }
    index += centroid_count;
  }
  for (uint32_t s = 0; s < kSamples; ++s) {
    __m512 largest = sums[s][0];
    for (uint32_t v = 1; v < kVectors; ++v) largest = _mm512_max_ps(largest, sums[s][v]);
    const float score = _mm512_reduce_max_ps(largest);
    const __m512 wanted = _mm512_set1_ps(score);
    uint64_t equal = 0;
    for (uint32_t v = 0; v < kVectors; ++v) {
      equal |= uint64_t{_mm512_cmpeq_ps_mask(sums[s][v], wanted)} << (16 * v);
    }
    // No bit only where scores are NaN, which finite samples cannot give.
    const uint32_t code = equal == 0 ? 0u : static_cast<uint32_t>(__builtin_ctzll(equal));
    if (first_centroid != 0 && !(score > scores[s])) continue;
    scores[s] = score;
    codes[s] = static_cast<uint8_t>(first_centroid + code);
  }
}

template <uint32_t kVectors, uint32_t kSamples, typename Product>
inline void FindTiles(const Product& product, uint32_t dim, uint32_t centroid_count,
                      const typename Product::Sample* samples, uint32_t sample_count,
                      uint8_t* codes, float* scores) {
  for (uint32_t first = 0; first < centroid_count; first += kVectors * 16) {
    uint32_t s = 0;
    for (; s + kSamples <= sample_count; s += kSamples) {
      FindTile<kVectors, kSamples>(product, dim, centroid_count, first, samples + size_t{s} * dim,
                                   codes + s, scores + s);
    }
    for (; s < sample_count; ++s) {
      FindTile<kVectors, 1>(product, dim, centroid_count, first, samples + size_t{s} * dim,
                            codes + s, scores + s);
    }
  }
}

template <typename Product>
inline void FindTiled(const Product& product, uint32_t dim, uint32_t centroid_count,
                      const typename Product::Sample* samples, uint32_t sample_count,
                      uint8_t* codes, float* scores) {
  if (centroid_count % 64 == 0) {
    FindTiles<4, 6>(product, dim, centroid_count, samples, sample_count, codes, scores);
  } else if (centroid_count % 32 == 0) {
    FindTiles<2, 12>(product, dim, centroid_count, samples, sample_count, codes, scores);
  } else {
    FindTiles<1, 24>(product, dim, centroid_count, samples, sample_count, codes, scores);
  }
}

}  // namespace
}  // namespace pqcached::kernels

#endif  // PQCACHED_KERNELS_NEAREST_TILE_AVX512_H_

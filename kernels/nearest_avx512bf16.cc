// Nearest centroids with vdpbf16ps: two dims to a product, twice the rate of fp32.
#include <immintrin.h>

#include "kernels/nearest.h"
#include "kernels/nearest_tile_avx512.h"

namespace pqcached::kernels {
namespace {

struct Bf16Product {
  using Sample = uint16_t;
  static constexpr uint32_t kStep = 2;  // dims per product

  const uint32_t* pairs;
  const float* bias;

  __m512 Bias(size_t centroid) const { return _mm512_loadu_ps(bias + centroid); }
  __m512 Load(size_t index) const { return _mm512_loadu_ps(pairs + index); }
  static __m512 Broadcast(const uint16_t* sample) {
    int pair;
    __builtin_memcpy(&pair, sample, sizeof(pair));
    return _mm512_castsi512_ps(_mm512_set1_epi32(pair));
  }
  static __m512 Add(__m512 sum, __m512 centroid, __m512 sample) {
    return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(centroid),
                            reinterpret_cast<__m512bh>(sample));
  }
};

void FindBf16(const NearestCentroids& centroids, const uint16_t* samples, uint32_t sample_count,
              uint8_t* codes, float* scores) {
  FindTiled(Bf16Product{centroids.pairs, centroids.pair_bias}, centroids.dim, centroids.count,
            samples, sample_count, codes, scores);
}

void AddBf16(uint32_t dim, const uint16_t* samples, uint32_t sample_count, const uint8_t* codes,
             float* sums, float* norms) {
  for (uint32_t s = 0; s < sample_count; ++s) {
    const uint16_t* sample = samples + size_t{s} * dim;
    float* sum = sums + size_t{codes[s]} * dim;
    __m512 norm = _mm512_setzero_ps();
    for (uint32_t i = 0; i < dim; i += 16) {
      const uint32_t rest = dim - i;
      const auto lanes = static_cast<__mmask16>(rest >= 16 ? 0xFFFFu : (1u << rest) - 1u);
      const __m512i bits = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(lanes, sample + i));
      const __m512 x = _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16));
      const __m512 old = _mm512_maskz_loadu_ps(lanes, sum + i);
      _mm512_mask_storeu_ps(sum + i, lanes, _mm512_add_ps(old, x));
      norm = _mm512_fmadd_ps(x, x, norm);
    }
    norms[s] = _mm512_reduce_add_ps(norm);
  }
}

}  // namespace

const NearestOps kNearestAvx512Bf16 = {.find = nullptr,
                                       .find_bf16 = FindBf16,
                                       .find_one = nullptr,
                                       .add = nullptr,
                                       .add_bf16 = AddBf16};

}  // namespace pqcached::kernels

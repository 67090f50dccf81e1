// Nearest centroids with 16 centroids to a register and tiles of 24 accumulators, which hide the
// latency of the multiplications and load each register of centroids once for several samples.
#include <immintrin.h>

#include "kernels/nearest.h"
#include "kernels/nearest_tile_avx512.h"

namespace pqcached::kernels {
namespace {

struct F32Product {
  using Sample = float;
  static constexpr uint32_t kStep = 1;  // dims per product

  const float* columns;
  const float* bias;

  __m512 Bias(size_t centroid) const { return _mm512_loadu_ps(bias + centroid); }
  __m512 Load(size_t index) const { return _mm512_loadu_ps(columns + index); }
  static __m512 Broadcast(const float* sample) { return _mm512_set1_ps(*sample); }
  static __m512 Add(__m512 sum, __m512 centroid, __m512 sample) {
    return _mm512_fmadd_ps(centroid, sample, sum);
  }
};

void Find(const NearestCentroids& centroids, const float* samples, uint32_t sample_count,
          uint8_t* codes, float* scores) {
  FindTiled(F32Product{centroids.columns, centroids.bias}, centroids.dim, centroids.count, samples,
            sample_count, codes, scores);
}

__mmask16 LanesFrom(uint32_t i, uint32_t dim) {
  const uint32_t rest = dim - i;
  return static_cast<__mmask16>(rest >= 16 ? 0xFFFFu : (1u << rest) - 1u);
}

uint32_t FindOne(const float* rows, uint32_t count, uint32_t dim, const float* sample) {
  uint32_t nearest = 0;
  float least = 0.0f;
  for (uint32_t c = 0; c < count; ++c) {
    const float* row = rows + size_t{c} * dim;
    __m512 sum = _mm512_setzero_ps();
    for (uint32_t i = 0; i < dim; i += 16) {
      const __mmask16 lanes = LanesFrom(i, dim);
      const __m512 difference = _mm512_sub_ps(_mm512_maskz_loadu_ps(lanes, sample + i),
                                              _mm512_maskz_loadu_ps(lanes, row + i));
      sum = _mm512_fmadd_ps(difference, difference, sum);
    }
    const float distance = _mm512_reduce_add_ps(sum);
    if (c == 0 || distance < least) {
      least = distance;
      nearest = c;
    }
  }
  return nearest;
}

void Add(uint32_t dim, const float* samples, uint32_t sample_count, const uint8_t* codes,
         float* sums, float* norms) {
  for (uint32_t s = 0; s < sample_count; ++s) {
    const float* sample = samples + size_t{s} * dim;
    float* sum = sums + size_t{codes[s]} * dim;
    __m512 norm = _mm512_setzero_ps();
    for (uint32_t i = 0; i < dim; i += 16) {
      const __mmask16 lanes = LanesFrom(i, dim);
      const __m512 x = _mm512_maskz_loadu_ps(lanes, sample + i);
      const __m512 old = _mm512_maskz_loadu_ps(lanes, sum + i);
      _mm512_mask_storeu_ps(sum + i, lanes, _mm512_add_ps(old, x));
      norm = _mm512_fmadd_ps(x, x, norm);
    }
    norms[s] = _mm512_reduce_add_ps(norm);
  }
}

}  // namespace

const NearestOps kNearestAvx512 = {
    .find = Find, .find_bf16 = nullptr, .find_one = FindOne, .add = Add, .add_bf16 = nullptr};

}  // namespace pqcached::kernels

// Nearest centroids with vdpbf16ps: two dims per product, twice the rate of fp32.
#include "kernels/base/simd/simd_avx512.h"
// Vec must be included first: the next headers are written in terms of it.
#include "kernels/train/nearest_simd.h"

namespace pqcached::kernels {
namespace {

struct Bf16Product {
  using Sample = uint16_t;
  static constexpr uint32_t kStep = 2;

  const float* columns;  // pairs of bf16
  const float* bias;

  PQC_INLINE __m512 Broadcast(const uint16_t* sample) {
    int pair;
    __builtin_memcpy(&pair, sample, sizeof(pair));
    return _mm512_castsi512_ps(_mm512_set1_epi32(pair));
  }
  PQC_INLINE __m512 Add(__m512 sum, __m512 centroid, __m512 sample) {
    return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(centroid),
                            reinterpret_cast<__m512bh>(sample));
  }
};

void FindBf16(const NearestCentroids& centroids, const uint16_t* samples, uint32_t sample_count,
              int16_t* /*block*/, uint8_t* codes, float* scores) {
  const float* pairs = reinterpret_cast<const float*>(centroids.pairs);
  FindTiled(Bf16Product{pairs, centroids.pair_bias}, centroids, samples, sample_count, codes,
            scores);
}

}  // namespace

const NearestOps kNearestAvx512Bf16 = {.find = nullptr,
                                       .find_bf16 = FindBf16,
                                       .find_one = nullptr,
                                       .add = nullptr,
                                       .add_bf16 = AddSamples<uint16_t>,
                                       .pair_form = PairForm::kBf16,
                                       .bf16_dims = 2};

}  // namespace pqcached::kernels

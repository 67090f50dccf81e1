// Include only in files compiled for AVX2; the function is static, so that every copy is local to
// its file.
#ifndef PQCACHED_KERNELS_BASE_SIMD_SIMD_EXP_AVX2_H_
#define PQCACHED_KERNELS_BASE_SIMD_SIMD_EXP_AVX2_H_

#include <immintrin.h>

#include "kernels/base/group_rule.h"

namespace pqcached::kernels {

// Returns exp(x) with a relative error of at most 3e-6 for kMinExponent <= x <= 0, zero below and 1
// above. Computes what ExpAvx512 does, with the power of two added to the exponent.
static inline __m256 ExpFloats(__m256 x) {
  const __m256 large = _mm256_cmp_ps(x, _mm256_set1_ps(kMinExponent), _CMP_GE_OQ);
  const __m256 y =
      _mm256_mul_ps(_mm256_min_ps(x, _mm256_setzero_ps()), _mm256_set1_ps(1.44269504f));
  const __m256 floor = _mm256_floor_ps(y);
  const __m256 r = _mm256_sub_ps(y, floor);
  __m256 polynomial = _mm256_set1_ps(1.877576673e-03f);
  polynomial = _mm256_fmadd_ps(polynomial, r, _mm256_set1_ps(8.989340095e-03f));
  polynomial = _mm256_fmadd_ps(polynomial, r, _mm256_set1_ps(5.582631805e-02f));
  polynomial = _mm256_fmadd_ps(polynomial, r, _mm256_set1_ps(2.401536170e-01f));
  polynomial = _mm256_fmadd_ps(polynomial, r, _mm256_set1_ps(6.931530732e-01f));
  polynomial = _mm256_fmadd_ps(polynomial, r, _mm256_set1_ps(9.999999251e-01f));
  // The exponents of large lanes stay within those of normal floats.
  const __m256i power = _mm256_slli_epi32(_mm256_cvtps_epi32(floor), 23);
  const __m256 scaled =
      _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(polynomial), power));
  return _mm256_and_ps(large, scaled);
}

}  // namespace pqcached::kernels

#endif  // PQCACHED_KERNELS_BASE_SIMD_SIMD_EXP_AVX2_H_

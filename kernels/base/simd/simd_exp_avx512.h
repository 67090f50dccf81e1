// ExpAvx512 is FastExp for 16 floats. Include only in files compiled for AVX-512; the function is
// static, so that every copy is local to its file.
#ifndef PQCACHED_KERNELS_BASE_SIMD_SIMD_EXP_AVX512_H_
#define PQCACHED_KERNELS_BASE_SIMD_SIMD_EXP_AVX512_H_

#include <immintrin.h>

#include "kernels/base/group_rule.h"

namespace pqcached::kernels {

// Returns exp(x) with a relative error of at most 3e-6 for kMinExponent <= x <= 0, zero below and 1
// above.
//
// Computes 2^y with y = x log2(e): the polynomial handles the part of y above its floor, scalef the
// floor. Rounding of y is the largest error, and only where the weight is tiny.
static inline __m512 ExpAvx512(__m512 x) {
  const __mmask16 large = _mm512_cmp_ps_mask(x, _mm512_set1_ps(kMinExponent), _CMP_GE_OQ);
  const __m512 y =
      _mm512_mul_ps(_mm512_min_ps(x, _mm512_setzero_ps()), _mm512_set1_ps(1.44269504f));
  const __m512 r = _mm512_reduce_ps(y, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  __m512 polynomial = _mm512_set1_ps(1.877576673e-03f);
  polynomial = _mm512_fmadd_ps(polynomial, r, _mm512_set1_ps(8.989340095e-03f));
  polynomial = _mm512_fmadd_ps(polynomial, r, _mm512_set1_ps(5.582631805e-02f));
  polynomial = _mm512_fmadd_ps(polynomial, r, _mm512_set1_ps(2.401536170e-01f));
  polynomial = _mm512_fmadd_ps(polynomial, r, _mm512_set1_ps(6.931530732e-01f));
  polynomial = _mm512_fmadd_ps(polynomial, r, _mm512_set1_ps(9.999999251e-01f));
  return _mm512_maskz_scalef_ps(large, polynomial, y);
}

}  // namespace pqcached::kernels

#endif  // PQCACHED_KERNELS_BASE_SIMD_SIMD_EXP_AVX512_H_

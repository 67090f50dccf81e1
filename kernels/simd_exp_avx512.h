// ExpAvx512: FastExp for 16 floats. For files that are compiled for AVX-512 only; static, so that
// no copy leaves them.
#ifndef PQCACHED_KERNELS_SIMD_EXP_AVX512_H_
#define PQCACHED_KERNELS_SIMD_EXP_AVX512_H_

#include <immintrin.h>

#include "kernels/group_rule.h"

namespace pqcached::kernels {

// Returns exp(x) within 2e-7 of itself for kMinExponent <= x <= 0, zero below and 1 above.
static inline __m512 ExpAvx512(__m512 x) {
  const __mmask16 large = _mm512_cmp_ps_mask(x, _mm512_set1_ps(kMinExponent), _CMP_GE_OQ);
  x = _mm512_min_ps(x, _mm512_setzero_ps());
  const __m512 exponent = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 0);
  __m512 r = _mm512_fnmadd_ps(exponent, _mm512_set1_ps(0.693359375f), x);
  r = _mm512_fnmadd_ps(exponent, _mm512_set1_ps(-2.12194440e-4f), r);
  __m512 polynomial = _mm512_set1_ps(1.9875691500e-4f);
  polynomial = _mm512_fmadd_ps(polynomial, r, _mm512_set1_ps(1.3981999507e-3f));
  polynomial = _mm512_fmadd_ps(polynomial, r, _mm512_set1_ps(8.3334519073e-3f));
  polynomial = _mm512_fmadd_ps(polynomial, r, _mm512_set1_ps(4.1665795894e-2f));
  polynomial = _mm512_fmadd_ps(polynomial, r, _mm512_set1_ps(1.6666665459e-1f));
  polynomial = _mm512_fmadd_ps(polynomial, r, _mm512_set1_ps(5.0000001201e-1f));
  polynomial = _mm512_fmadd_ps(_mm512_mul_ps(polynomial, r), r, r);
  polynomial = _mm512_add_ps(polynomial, _mm512_set1_ps(1.0f));
  return _mm512_maskz_scalef_ps(large, polynomial, exponent);
}

}  // namespace pqcached::kernels

#endif  // PQCACHED_KERNELS_SIMD_EXP_AVX512_H_

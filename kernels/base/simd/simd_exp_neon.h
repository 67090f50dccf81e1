// Include only in files of NEON; the function is static, so that every copy is local to its file.
#ifndef PQCACHED_KERNELS_BASE_SIMD_SIMD_EXP_NEON_H_
#define PQCACHED_KERNELS_BASE_SIMD_SIMD_EXP_NEON_H_

#include <arm_neon.h>

#include "kernels/base/group_rule.h"
#include "kernels/base/simd/simd_neon.h"

namespace pqcached::kernels {

[[gnu::always_inline]] static inline float32x4_t ExpFour(float32x4_t x) {
  const uint32x4_t large = vcgeq_f32(x, vdupq_n_f32(kMinExponent));
  const float32x4_t y = vmulq_n_f32(vminq_f32(x, vdupq_n_f32(0.0f)), 1.44269504f);
  const float32x4_t floor = vrndmq_f32(y);
  const float32x4_t r = vsubq_f32(y, floor);
  float32x4_t polynomial = vdupq_n_f32(1.877576673e-03f);
  polynomial = vfmaq_f32(vdupq_n_f32(8.989340095e-03f), polynomial, r);
  polynomial = vfmaq_f32(vdupq_n_f32(5.582631805e-02f), polynomial, r);
  polynomial = vfmaq_f32(vdupq_n_f32(2.401536170e-01f), polynomial, r);
  polynomial = vfmaq_f32(vdupq_n_f32(6.931530732e-01f), polynomial, r);
  polynomial = vfmaq_f32(vdupq_n_f32(9.999999251e-01f), polynomial, r);
  // The exponents of large lanes stay within those of normal floats.
  const uint32x4_t power = vshlq_n_u32(vreinterpretq_u32_s32(vcvtq_s32_f32(floor)), 23);
  const uint32x4_t scaled = vaddq_u32(vreinterpretq_u32_f32(polynomial), power);
  return vreinterpretq_f32_u32(vandq_u32(large, scaled));
}

// Computes what ExpFloats of simd_exp_avx2.h does.
[[gnu::always_inline]] static inline Vec::F ExpFloats(Vec::F x) {
  return {ExpFour(x.low), ExpFour(x.high)};
}

}  // namespace pqcached::kernels

#endif  // PQCACHED_KERNELS_BASE_SIMD_SIMD_EXP_NEON_H_

// Vec with eight floats in two registers of NEON: the members that selections use.
// simd_portable.h describes them.
//
// Include only in files of this instruction set; everything is local to the including file.
#ifndef PQCACHED_KERNELS_BASE_SIMD_SIMD_NEON_H_
#define PQCACHED_KERNELS_BASE_SIMD_SIMD_NEON_H_

#include <arm_neon.h>

#include <cstdint>

namespace pqcached::kernels {
namespace {

#define PQC_INLINE [[gnu::always_inline]] static inline

struct Vec {
  struct F {
    float32x4_t low;
    float32x4_t high;

    [[gnu::always_inline]] friend F operator+(F a, F b) {
      return {vaddq_f32(a.low, b.low), vaddq_f32(a.high, b.high)};
    }
    [[gnu::always_inline]] friend F operator-(F a, F b) {
      return {vsubq_f32(a.low, b.low), vsubq_f32(a.high, b.high)};
    }
  };

  static constexpr uint32_t kLanes = 8;

  PQC_INLINE F Set(float value) { return {vdupq_n_f32(value), vdupq_n_f32(value)}; }
  PQC_INLINE F Load(const float* from) { return {vld1q_f32(from), vld1q_f32(from + 4)}; }
  PQC_INLINE void Store(float* to, F value) {
    vst1q_f32(to, value.low);
    vst1q_f32(to + 4, value.high);
  }
  PQC_INLINE F MulAdd(F a, F b, F c) {
    return {vfmaq_f32(c.low, a.low, b.low), vfmaq_f32(c.high, a.high, b.high)};
  }
  // Not vmaxq_f32 and vminq_f32, which return NaN for NaN.
  PQC_INLINE F Max(F a, F b) {
    return {vbslq_f32(vcgtq_f32(a.low, b.low), a.low, b.low),
            vbslq_f32(vcgtq_f32(a.high, b.high), a.high, b.high)};
  }
  PQC_INLINE F Min(F a, F b) {
    return {vbslq_f32(vcltq_f32(a.low, b.low), a.low, b.low),
            vbslq_f32(vcltq_f32(a.high, b.high), a.high, b.high)};
  }
  PQC_INLINE float Sum(F a) { return vaddvq_f32(vaddq_f32(a.low, a.high)); }
  PQC_INLINE float Largest(F a) { return vmaxvq_f32(vmaxq_f32(a.low, a.high)); }
};

#undef PQC_INLINE

}  // namespace
}  // namespace pqcached::kernels

#endif  // PQCACHED_KERNELS_BASE_SIMD_SIMD_NEON_H_

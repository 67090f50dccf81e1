// Vec with four floats in the compiler's own vector extension, for machines without a Vec file of
// their own (SSE2, NEON).
//
// Each kernel's portable file includes it; everything is local to the including file. The three Vec
// structs (simd_portable.h, simd_avx2.h, simd_avx512.h) have the same members, so that *_simd.h is
// written once.
#ifndef PQCACHED_KERNELS_BASE_SIMD_SIMD_PORTABLE_H_
#define PQCACHED_KERNELS_BASE_SIMD_SIMD_PORTABLE_H_

#include <cstddef>
#include <cstdint>

#include "kernels/base/dtype.h"

namespace pqcached::kernels {
namespace {

#define PQC_INLINE [[gnu::always_inline]] static inline

struct Vec {
  using F = float __attribute__((vector_size(16)));  // +, -, * and / work on every F
  using I = int32_t __attribute__((vector_size(16)));
  using U = uint32_t __attribute__((vector_size(16)));
  using H = uint16_t __attribute__((vector_size(8)));

  static constexpr uint32_t kLanes = 4;
  static constexpr uint32_t kAccumulators = 8;  // registers for sums of a dot-product or value tile

  PQC_INLINE F Set(float value) { return F{value, value, value, value}; }
  PQC_INLINE F Load(const float* from) {
    F value;
    __builtin_memcpy(&value, from, sizeof(value));
    return value;
  }
  PQC_INLINE void Store(float* to, F value) { __builtin_memcpy(to, &value, sizeof(value)); }
  PQC_INLINE F MulAdd(F a, F b, F c) { return a * b + c; }
  PQC_INLINE F NegMulAdd(F a, F b, F c) { return c - a * b; }
  // Max and Min return b when a is NaN.
  PQC_INLINE F Max(F a, F b) { return a > b ? a : b; }
  PQC_INLINE F Min(F a, F b) { return a < b ? a : b; }
  PQC_INLINE F Abs(F a) { return reinterpret_cast<F>(reinterpret_cast<U>(a) & 0x7fffffffu); }
  PQC_INLINE F CopySign(F magnitude, F sign) {
    return reinterpret_cast<F>((reinterpret_cast<U>(magnitude) & 0x7fffffffu) |
                               (reinterpret_cast<U>(sign) & 0x80000000u));
  }
  // Returns the nearest integer. REQUIRES: |a| < 2^22.
  PQC_INLINE F Round(F a) { return (a + 12582912.0f) - 12582912.0f; }
  // Returns a * 2^n. REQUIRES: n integral in -126..127.
  PQC_INLINE F Ldexp(F a, F n) {
    return a * reinterpret_cast<F>((__builtin_convertvector(n, I) + 127) << 23);
  }
  // Returns value where x >= limit, else 0.
  PQC_INLINE F ZeroIfLess(F x, float limit, F value) { return x >= limit ? value : F{}; }

  PQC_INLINE float Sum(F a) { return (a[0] + a[1]) + (a[2] + a[3]); }
  PQC_INLINE float Largest(F a) {
    const float low = a[0] > a[1] ? a[0] : a[1];
    const float high = a[2] > a[3] ? a[2] : a[3];
    return low > high ? low : high;
  }

  // Sets bit i of the result if a and b are equal in lane i.
  PQC_INLINE uint32_t EqualMask(F a, F b) {
    uint32_t mask = 0;
    for (uint32_t i = 0; i < kLanes; ++i) mask |= (a[i] == b[i] ? 1u : 0u) << i;
    return mask;
  }

  // Loads elements [index, index + kLanes) of a row as floats.
  template <DType kType>
  PQC_INLINE F LoadRow(const std::byte* row, uint32_t index) {
    if constexpr (kType == DType::kF32) {
      F value;
      __builtin_memcpy(&value, row + index * 4, sizeof(value));
      return value;
    } else {
      H half;
      __builtin_memcpy(&half, row + index * 2, sizeof(half));
      const U bits = __builtin_convertvector(half, U);
      if constexpr (kType == DType::kBf16) return reinterpret_cast<F>(bits << 16);
      // The exponent is adjusted by a multiplication, which is right for subnormals too. Rows are
      // finite.
      const F magnitude = reinterpret_cast<F>((bits & 0x7fffu) << 13) * 0x1p112f;
      return reinterpret_cast<F>(reinterpret_cast<U>(magnitude) | ((bits & 0x8000u) << 16));
    }
  }

  // The same for the last 8 elements of a row, where kLanes is 16.
  template <DType kType>
  PQC_INLINE F LoadRowHalf(const std::byte* row, uint32_t index) {
    return LoadRow<kType>(row, index);
  }

  // Sets to[q * stride + t] = sum of accumulators[q * (kAccumulators / kQueries) + t].
  template <int kQueries>
  PQC_INLINE void StoreSums(const F (&accumulators)[kAccumulators], float* to, size_t stride) {
    constexpr uint32_t kTokens = kAccumulators / kQueries;
    for (uint32_t i = 0; i < kAccumulators; ++i) {
      to[i / kTokens * stride + i % kTokens] = Sum(accumulators[i]);
    }
  }

  PQC_INLINE void Prefetch(const std::byte* from) { __builtin_prefetch(from, 0, 1); }
};

}  // namespace
}  // namespace pqcached::kernels

#endif  // PQCACHED_KERNELS_BASE_SIMD_SIMD_PORTABLE_H_

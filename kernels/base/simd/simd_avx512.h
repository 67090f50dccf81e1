// Vec with sixteen floats in AVX-512 F/BW/VL/DQ. simd_portable.h describes the members.
//
// Include only in files compiled for this instruction set; everything is local to the including
// file.
#ifndef PQCACHED_KERNELS_BASE_SIMD_SIMD_AVX512_H_
#define PQCACHED_KERNELS_BASE_SIMD_SIMD_AVX512_H_

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "kernels/base/dtype.h"

namespace pqcached::kernels {
namespace {

#define PQC_INLINE [[gnu::always_inline]] static inline

struct Vec {
  using F = __m512;

  static constexpr uint32_t kLanes = 16;
  static constexpr uint32_t kAccumulators = 16;

  PQC_INLINE F Set(float value) { return _mm512_set1_ps(value); }
  PQC_INLINE F Load(const float* from) { return _mm512_loadu_ps(from); }
  PQC_INLINE void Store(float* to, F value) { _mm512_storeu_ps(to, value); }
  PQC_INLINE F MulAdd(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
  PQC_INLINE F NegMulAdd(F a, F b, F c) { return _mm512_fnmadd_ps(a, b, c); }
  PQC_INLINE F Max(F a, F b) { return _mm512_max_ps(a, b); }
  PQC_INLINE F Min(F a, F b) { return _mm512_min_ps(a, b); }
  PQC_INLINE F Abs(F a) { return _mm512_abs_ps(a); }
  PQC_INLINE F CopySign(F magnitude, F sign) {
    return _mm512_or_ps(Abs(magnitude), _mm512_and_ps(Set(-0.0f), sign));
  }
  PQC_INLINE F Round(F a) {
    return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }
  PQC_INLINE F Ldexp(F a, F n) { return _mm512_scalef_ps(a, n); }
  PQC_INLINE F ZeroIfLess(F x, float limit, F value) {
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, Set(limit), _CMP_GE_OQ), value);
  }

  PQC_INLINE float Sum(F a) { return _mm512_reduce_add_ps(a); }
  PQC_INLINE float Largest(F a) { return _mm512_reduce_max_ps(a); }
  PQC_INLINE uint32_t EqualMask(F a, F b) { return _mm512_cmpeq_ps_mask(a, b); }

  PQC_INLINE F WidenBf16(__m256i half) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
  }
  template <DType kType>
  PQC_INLINE F LoadRow(const std::byte* row, uint32_t index) {
    if constexpr (kType == DType::kF32) {
      return _mm512_loadu_ps(row + index * 4);
    } else {
      const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(row + index * 2));
      if constexpr (kType == DType::kF16) return _mm512_cvtph_ps(half);
      return WidenBf16(half);
    }
  }
  template <DType kType>
  PQC_INLINE F LoadRowHalf(const std::byte* row, uint32_t index) {
    if constexpr (kType == DType::kF32) {
      return _mm512_maskz_loadu_ps(0xff, row + index * 4);
    } else {
      const __m256i half = _mm256_zextsi128_si256(
          _mm_loadu_si128(reinterpret_cast<const __m128i*>(row + index * 2)));
      if constexpr (kType == DType::kF16) return _mm512_cvtph_ps(half);
      return WidenBf16(half);
    }
  }

  // Sixteen sums are computed by four levels of pairwise additions.
  PQC_INLINE F Sums4(F a0, F a1, F a2, F a3) {
    const F a01 = _mm512_add_ps(_mm512_unpacklo_ps(a0, a1), _mm512_unpackhi_ps(a0, a1));
    const F a23 = _mm512_add_ps(_mm512_unpacklo_ps(a2, a3), _mm512_unpackhi_ps(a2, a3));
    const __m512d b0 = _mm512_castps_pd(a01);
    const __m512d b1 = _mm512_castps_pd(a23);
    return _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(b0, b1)),
                         _mm512_castpd_ps(_mm512_unpackhi_pd(b0, b1)));
  }
  PQC_INLINE F AddBlocks(F a, F b) {
    return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
  }
  PQC_INLINE F Sums(const F (&a)[16]) {
    return AddBlocks(AddBlocks(Sums4(a[0], a[1], a[2], a[3]), Sums4(a[4], a[5], a[6], a[7])),
                     AddBlocks(Sums4(a[8], a[9], a[10], a[11]), Sums4(a[12], a[13], a[14], a[15])));
  }
  template <int kQueries>
  PQC_INLINE void StoreSums(const F (&accumulators)[kAccumulators], float* to, size_t stride) {
    const F sums = Sums(accumulators);
    if constexpr (kQueries == 1) {
      Store(to, sums);
    } else if constexpr (kQueries == 2) {
      _mm256_storeu_ps(to, _mm512_castps512_ps256(sums));
      _mm256_storeu_ps(to + stride, _mm512_extractf32x8_ps(sums, 1));
    } else {
      _mm_storeu_ps(to, _mm512_castps512_ps128(sums));
      _mm_storeu_ps(to + stride, _mm512_extractf32x4_ps(sums, 1));
      _mm_storeu_ps(to + 2 * stride, _mm512_extractf32x4_ps(sums, 2));
      _mm_storeu_ps(to + 3 * stride, _mm512_extractf32x4_ps(sums, 3));
    }
  }

  // Stores to elements [index, index + kLanes) of a row, rounding to nearest even. REQUIRES for
  // bf16: finite.
  template <DType kType>
  PQC_INLINE void StoreRow(std::byte* row, uint32_t index, F value) {
    if constexpr (kType == DType::kF32) {
      _mm512_storeu_ps(row + index * 4, value);
    } else {
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(row + index * 2), Narrow<kType>(value));
    }
  }
  template <DType kType>
  PQC_INLINE void StoreRowHalf(std::byte* row, uint32_t index, F value) {
    if constexpr (kType == DType::kF32) {
      _mm512_mask_storeu_ps(row + index * 4, 0xff, value);
    } else {
      _mm_storeu_si128(reinterpret_cast<__m128i*>(row + index * 2),
                       _mm256_castsi256_si128(Narrow<kType>(value)));
    }
  }
  // Stores like StoreRow, non-temporally. REQUIRES: the target is aligned to the bytes stored.
  template <DType kType>
  PQC_INLINE void StreamRow(std::byte* row, uint32_t index, F value) {
    if constexpr (kType == DType::kF32) {
      _mm512_stream_ps(reinterpret_cast<float*>(row) + index, value);
    } else {
      _mm256_stream_si256(reinterpret_cast<__m256i*>(row + index * 2), Narrow<kType>(value));
    }
  }
  template <DType kType>
  PQC_INLINE __m256i Narrow(F value) {
    if constexpr (kType == DType::kF16) {
      return _mm512_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    } else {
      // vcvtneps2bf16 is not used because it treats denormals as zero.
      const __m512i bits = _mm512_castps_si512(value);
      const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
      const __m512i rounded =
          _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
      return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
    }
  }

  // Converts int8 elements without scaling; stores round to nearest even. REQUIRES: within +-127.
  PQC_INLINE F LoadInt8(const std::byte* from) {
    return _mm512_cvtepi32_ps(
        _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
  }
  PQC_INLINE F LoadInt8Half(const std::byte* from) {
    return _mm512_cvtepi32_ps(
        _mm512_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
  }
  PQC_INLINE void StoreInt8(std::byte* to, F value) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to),
                     _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(value)));
  }
  PQC_INLINE void StoreInt8Half(std::byte* to, F value) {
    _mm_storel_epi64(reinterpret_cast<__m128i*>(to),
                     _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(value)));
  }

  // Returns its argument. What is computed of the result is computed of one load: without this,
  // compilers load memory again where that saves a register, and rows in memory that another
  // process writes are then checked and stored with different contents.
  template <class Register>
  PQC_INLINE Register LoadedOnce(Register loaded) {
    asm("" : "+v"(loaded));
    return loaded;
  }

  // Magnitudes as integers are ordered like the floats, with infinity and NaN above all others.
  using Bits = __m512i;
  PQC_INLINE Bits ZeroBits() { return _mm512_setzero_si512(); }
  PQC_INLINE Bits MaxMagnitude(Bits most, F value) {
    return _mm512_max_epu32(most, _mm512_castps_si512(Abs(value)));
  }
  PQC_INLINE bool AnyAtLeast(Bits most, uint32_t limit) {
    return _mm512_cmpge_epu32_mask(most, _mm512_set1_epi32(static_cast<int>(limit))) != 0;
  }
  // Copies 16-bit elements [0, count), count a multiple of 8, and returns the maximum of `most` and
  // their magnitudes.
  PQC_INLINE Bits CopyHalves(std::byte* to, const std::byte* from, uint32_t count, Bits most) {
    const __m512i magnitude = _mm512_set1_epi16(0x7fff);
    uint32_t i = 0;
    for (; i + 32 <= count; i += 32) {
      const __m512i bits = LoadedOnce(_mm512_loadu_si512(from + i * 2));
      most = _mm512_max_epu16(most, _mm512_and_si512(bits, magnitude));
      _mm512_storeu_si512(to + i * 2, bits);
    }
    if (i < count) {
      const auto mask = static_cast<__mmask32>((uint32_t{1} << (count - i)) - 1);
      const __m512i bits = LoadedOnce(_mm512_maskz_loadu_epi16(mask, from + i * 2));
      most = _mm512_max_epu16(most, _mm512_and_si512(bits, magnitude));
      _mm512_mask_storeu_epi16(to + i * 2, mask, bits);
    }
    return most;
  }
  // The same for 32 elements, non-temporally, with `to` aligned to 64 bytes.
  PQC_INLINE Bits StreamHalves(std::byte* to, const std::byte* from, Bits most) {
    const __m512i bits = LoadedOnce(_mm512_loadu_si512(from));
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to), bits);
    return _mm512_max_epu16(most, _mm512_and_si512(bits, _mm512_set1_epi16(0x7fff)));
  }
  PQC_INLINE bool AnyHalfAtLeast(Bits most, uint16_t limit) {
    return _mm512_cmpge_epu16_mask(most, _mm512_set1_epi16(static_cast<short>(limit))) != 0;
  }

  // Copies 64 bytes. StreamLine: non-temporal, with `to` aligned to 64 bytes.
  PQC_INLINE void CopyLine(std::byte* to, const std::byte* from) {
    _mm512_storeu_si512(to, _mm512_loadu_si512(from));
  }
  PQC_INLINE void StreamLine(std::byte* to, const std::byte* from) {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to), _mm512_loadu_si512(from));
  }
  PQC_INLINE void Fence() { _mm_sfence(); }

  PQC_INLINE void Prefetch(const std::byte* from) { _mm_prefetch(from, _MM_HINT_T2); }
};

}  // namespace
}  // namespace pqcached::kernels

#endif  // PQCACHED_KERNELS_BASE_SIMD_SIMD_AVX512_H_

// Vec with eight floats in AVX2 + FMA + F16C. simd_portable.h describes the members.
//
// Include only in files compiled for this instruction set; everything is local to the including
// file.
#ifndef PQCACHED_KERNELS_BASE_SIMD_SIMD_AVX2_H_
#define PQCACHED_KERNELS_BASE_SIMD_SIMD_AVX2_H_

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "kernels/base/dtype.h"

namespace pqcached::kernels {
namespace {

#define PQC_INLINE [[gnu::always_inline]] static inline

struct Vec {
  using F = __m256;

  static constexpr uint32_t kLanes = 8;
  static constexpr uint32_t kAccumulators = 8;

  PQC_INLINE F Set(float value) { return _mm256_set1_ps(value); }
  PQC_INLINE F Load(const float* from) { return _mm256_loadu_ps(from); }
  PQC_INLINE void Store(float* to, F value) { _mm256_storeu_ps(to, value); }
  PQC_INLINE F MulAdd(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
  PQC_INLINE F NegMulAdd(F a, F b, F c) { return _mm256_fnmadd_ps(a, b, c); }
  PQC_INLINE F Max(F a, F b) { return _mm256_max_ps(a, b); }
  PQC_INLINE F Min(F a, F b) { return _mm256_min_ps(a, b); }
  PQC_INLINE F Abs(F a) { return _mm256_andnot_ps(Set(-0.0f), a); }
  PQC_INLINE F CopySign(F magnitude, F sign) {
    return _mm256_or_ps(Abs(magnitude), _mm256_and_ps(Set(-0.0f), sign));
  }
  PQC_INLINE F Round(F a) {
    return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }
  PQC_INLINE F Ldexp(F a, F n) {
    const __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
    return _mm256_mul_ps(a, _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23)));
  }
  PQC_INLINE F ZeroIfLess(F x, float limit, F value) {
    return _mm256_and_ps(_mm256_cmp_ps(x, Set(limit), _CMP_GE_OQ), value);
  }

  PQC_INLINE float Sum(F a) {
    __m128 sum = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    sum = _mm_add_ps(sum, _mm_movehl_ps(sum, sum));
    return _mm_cvtss_f32(_mm_add_ss(sum, _mm_movehdup_ps(sum)));
  }
  PQC_INLINE float Largest(F a) {
    __m128 most = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    most = _mm_max_ps(most, _mm_movehl_ps(most, most));
    return _mm_cvtss_f32(_mm_max_ss(most, _mm_movehdup_ps(most)));
  }
  PQC_INLINE uint32_t EqualMask(F a, F b) {
    return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_EQ_OQ)));
  }

  template <DType kType>
  PQC_INLINE F LoadRow(const std::byte* row, uint32_t index) {
    if constexpr (kType == DType::kF32) {
      return _mm256_loadu_ps(reinterpret_cast<const float*>(row) + index);
    } else {
      const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(row + index * 2));
      if constexpr (kType == DType::kF16) return _mm256_cvtph_ps(half);
      return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
    }
  }
  template <DType kType>
  PQC_INLINE F LoadRowHalf(const std::byte* row, uint32_t index) {
    return LoadRow<kType>(row, index);
  }

  // Returns eight sums, computed by three levels of pairwise additions.
  PQC_INLINE F Sums(const F (&a)[8]) {
    const F low = _mm256_hadd_ps(_mm256_hadd_ps(a[0], a[1]), _mm256_hadd_ps(a[2], a[3]));
    const F high = _mm256_hadd_ps(_mm256_hadd_ps(a[4], a[5]), _mm256_hadd_ps(a[6], a[7]));
    return _mm256_add_ps(_mm256_permute2f128_ps(low, high, 0x20),
                         _mm256_permute2f128_ps(low, high, 0x31));
  }
  template <int kQueries>
  PQC_INLINE void StoreSums(const F (&accumulators)[kAccumulators], float* to, size_t stride) {
    const F sums = Sums(accumulators);
    if constexpr (kQueries == 1) {
      Store(to, sums);
    } else {
      const __m128 low = _mm256_castps256_ps128(sums);
      const __m128 high = _mm256_extractf128_ps(sums, 1);
      if constexpr (kQueries == 2) {
        _mm_storeu_ps(to, low);
        _mm_storeu_ps(to + stride, high);
      } else {
        _mm_storel_pi(reinterpret_cast<__m64*>(to), low);
        _mm_storeh_pi(reinterpret_cast<__m64*>(to + stride), low);
        _mm_storel_pi(reinterpret_cast<__m64*>(to + 2 * stride), high);
        _mm_storeh_pi(reinterpret_cast<__m64*>(to + 3 * stride), high);
      }
    }
  }

  // Stores to elements [index, index + kLanes) of a row, rounding to nearest even. REQUIRES for
  // bf16: finite.
  template <DType kType>
  PQC_INLINE void StoreRow(std::byte* row, uint32_t index, F value) {
    if constexpr (kType == DType::kF32) {
      _mm256_storeu_ps(reinterpret_cast<float*>(row) + index, value);
    } else {
      _mm_storeu_si128(reinterpret_cast<__m128i*>(row + index * 2), Narrow<kType>(value));
    }
  }
  template <DType kType>
  PQC_INLINE void StoreRowHalf(std::byte* row, uint32_t index, F value) {
    StoreRow<kType>(row, index, value);
  }
  // Stores like StoreRow, non-temporally. REQUIRES: the target is aligned to the bytes stored.
  template <DType kType>
  PQC_INLINE void StreamRow(std::byte* row, uint32_t index, F value) {
    if constexpr (kType == DType::kF32) {
      _mm256_stream_ps(reinterpret_cast<float*>(row) + index, value);
    } else {
      _mm_stream_si128(reinterpret_cast<__m128i*>(row + index * 2), Narrow<kType>(value));
    }
  }
  template <DType kType>
  PQC_INLINE __m128i Narrow(F value) {
    if constexpr (kType == DType::kF16) {
      return _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    } else {
      const __m256i bits = _mm256_castps_si256(value);
      const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
      const __m256i rounded = _mm256_srli_epi32(
          _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
      return _mm_packus_epi32(_mm256_castsi256_si128(rounded),
                              _mm256_extracti128_si256(rounded, 1));
    }
  }

  // Converts int8 elements without scaling; stores round to nearest even. REQUIRES: within +-127.
  PQC_INLINE F LoadInt8(const std::byte* from) {
    return _mm256_cvtepi32_ps(
        _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
  }
  PQC_INLINE F LoadInt8Half(const std::byte* from) { return LoadInt8(from); }
  PQC_INLINE void StoreInt8(std::byte* to, F value) {
    const __m256i wide = _mm256_cvtps_epi32(value);
    const __m128i half =
        _mm_packs_epi32(_mm256_castsi256_si128(wide), _mm256_extracti128_si256(wide, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(to), _mm_packs_epi16(half, half));
  }
  PQC_INLINE void StoreInt8Half(std::byte* to, F value) { StoreInt8(to, value); }

  // Returns its argument. What is computed of the result is computed of one load: without this,
  // compilers load memory again where that saves a register, and rows in memory that another
  // process writes are then checked and stored with different contents.
  template <class Register>
  PQC_INLINE Register LoadedOnce(Register loaded) {
    asm("" : "+x"(loaded));
    return loaded;
  }

  // Magnitudes as integers are ordered like the floats, with infinity and NaN above all others.
  using Bits = __m256i;
  PQC_INLINE Bits ZeroBits() { return _mm256_setzero_si256(); }
  PQC_INLINE Bits MaxMagnitude(Bits most, F value) {
    return _mm256_max_epu32(most, _mm256_castps_si256(Abs(value)));
  }
  PQC_INLINE bool AnyAtLeast(Bits most, uint32_t limit) {
    const __m256i limits = _mm256_set1_epi32(static_cast<int>(limit));
    const __m256i reached = _mm256_cmpeq_epi32(_mm256_max_epu32(most, limits), most);
    return _mm256_movemask_epi8(reached) != 0;
  }
  // Copies 16-bit elements [0, count), count a multiple of 8, and returns the maximum of `most` and
  // their magnitudes.
  PQC_INLINE Bits CopyHalves(std::byte* to, const std::byte* from, uint32_t count, Bits most) {
    const __m256i magnitude = _mm256_set1_epi16(0x7fff);
    uint32_t i = 0;
    for (; i + 16 <= count; i += 16) {
      const __m256i bits =
          LoadedOnce(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i * 2)));
      most = _mm256_max_epu16(most, _mm256_and_si256(bits, magnitude));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + i * 2), bits);
    }
    if (i < count) {
      const __m128i bits =
          LoadedOnce(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i * 2)));
      most = _mm256_max_epu16(most, _mm256_and_si256(_mm256_zextsi128_si256(bits), magnitude));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i * 2), bits);
    }
    return most;
  }
  // The same for 32 elements, non-temporally, with `to` aligned to 64 bytes.
  PQC_INLINE Bits StreamHalves(std::byte* to, const std::byte* from, Bits most) {
    const __m256i magnitude = _mm256_set1_epi16(0x7fff);
    const __m256i* source = reinterpret_cast<const __m256i*>(from);
    __m256i* target = reinterpret_cast<__m256i*>(to);
    const __m256i low = LoadedOnce(_mm256_loadu_si256(source));
    const __m256i high = LoadedOnce(_mm256_loadu_si256(source + 1));
    _mm256_stream_si256(target, low);
    _mm256_stream_si256(target + 1, high);
    most = _mm256_max_epu16(most, _mm256_and_si256(low, magnitude));
    return _mm256_max_epu16(most, _mm256_and_si256(high, magnitude));
  }
  PQC_INLINE bool AnyHalfAtLeast(Bits most, uint16_t limit) {
    const __m256i limits = _mm256_set1_epi16(static_cast<short>(limit));
    const __m256i reached = _mm256_cmpeq_epi16(_mm256_max_epu16(most, limits), most);
    return _mm256_movemask_epi8(reached) != 0;
  }

  // Copies 64 bytes. StreamLine: non-temporal, with `to` aligned to 64 bytes.
  PQC_INLINE void CopyLine(std::byte* to, const std::byte* from) {
    const __m256i* source = reinterpret_cast<const __m256i*>(from);
    __m256i* target = reinterpret_cast<__m256i*>(to);
    const __m256i low = _mm256_loadu_si256(source);
    const __m256i high = _mm256_loadu_si256(source + 1);
    _mm256_storeu_si256(target, low);
    _mm256_storeu_si256(target + 1, high);
  }
  PQC_INLINE void StreamLine(std::byte* to, const std::byte* from) {
    const __m256i* source = reinterpret_cast<const __m256i*>(from);
    __m256i* target = reinterpret_cast<__m256i*>(to);
    const __m256i low = _mm256_loadu_si256(source);
    const __m256i high = _mm256_loadu_si256(source + 1);
    _mm256_stream_si256(target, low);
    _mm256_stream_si256(target + 1, high);
  }
  PQC_INLINE void Fence() { _mm_sfence(); }

  PQC_INLINE void Prefetch(const std::byte* from) { _mm_prefetch(from, _MM_HINT_T2); }
};

}  // namespace
}  // namespace pqcached::kernels

#endif  // PQCACHED_KERNELS_BASE_SIMD_SIMD_AVX2_H_

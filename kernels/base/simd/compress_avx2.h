// Eight floats or words at a time: comparisons to masks, loads and stores of the first lanes, and
// compression, which AVX2 has no instruction for. compress_neon.h has the same functions, so that
// *_simd.h is written once over both.
//
// Include only in files compiled for AVX2; the anonymous namespace keeps every copy local to its
// file.
#ifndef PQCACHED_KERNELS_BASE_SIMD_COMPRESS_AVX2_H_
#define PQCACHED_KERNELS_BASE_SIMD_COMPRESS_AVX2_H_

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "kernels/base/simd/bit_index_table.h"

namespace pqcached::kernels {
namespace {

using Floats = __m256;  // eight; + and - work on them
using Words = __m256i;
using Lanes = __m256;  // all bits of a lane, or none

inline Words SetWords(uint32_t word) { return _mm256_set1_epi32(static_cast<int>(word)); }

inline Words LoadWords(const uint32_t* from) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
}

inline void StoreWords(uint32_t* to, Words x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), x);
}

inline Words AddWords(Words a, Words b) { return _mm256_add_epi32(a, b); }

// Returns the differences of 16-bit numbers a[i] - b[i], modulo 2^16.
inline Words SubtractHalves(const uint16_t* a, const uint16_t* b) {
  return _mm256_cvtepu16_epi32(_mm_sub_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(a)),
                                             _mm_loadu_si128(reinterpret_cast<const __m128i*>(b))));
}

// Returns words below 2^31 as floats.
inline Floats ToFloats(Words x) { return _mm256_cvtepi32_ps(x); }

inline uint32_t SumOfWords(Words x) {
  __m128i sum = _mm_add_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
  sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0x4E));
  sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0xB1));
  return static_cast<uint32_t>(_mm_cvtsi128_si32(sum));
}

// Comparisons; false for NaN.
inline Lanes AtLeast(Floats a, Floats b) { return _mm256_cmp_ps(a, b, _CMP_GE_OQ); }
inline Lanes Above(Floats a, Floats b) { return _mm256_cmp_ps(a, b, _CMP_GT_OQ); }
inline Lanes Equal(Floats a, Floats b) { return _mm256_cmp_ps(a, b, _CMP_EQ_OQ); }

inline Lanes AllLanes() { return _mm256_castsi256_ps(_mm256_set1_epi32(-1)); }

// Returns the lanes of the mask in which x is not zero.
inline Lanes NotZero(Words x, Lanes mask) {
  return _mm256_andnot_ps(_mm256_castsi256_ps(_mm256_cmpeq_epi32(x, _mm256_setzero_si256())), mask);
}

inline Lanes Both(Lanes a, Lanes b) { return _mm256_and_ps(a, b); }

// Returns x in the lanes of the mask, and `other` or zero in the rest.
inline Floats Choose(Lanes mask, Floats x, Floats other) {
  return _mm256_blendv_ps(other, x, mask);
}
inline Words Choose(Lanes mask, Words x) { return _mm256_and_si256(_mm256_castps_si256(mask), x); }

// Adds 1 to the words in the lanes of the mask.
inline Words CountLanes(Words counts, Lanes mask) {
  return _mm256_sub_epi32(counts, _mm256_castps_si256(mask));
}

inline uint32_t MaskBits(Lanes mask) { return static_cast<uint32_t>(_mm256_movemask_ps(mask)); }

inline uint32_t BitCount(uint32_t mask) { return static_cast<uint32_t>(__builtin_popcount(mask)); }

// Returns the index of the lowest bit, or 32 if there is none.
inline uint32_t LowestBit(uint32_t mask) { return _tzcnt_u32(mask); }

// Returns the indices of the bits of `mask` (below 256), one a lane.
inline Words BitIndexes(uint32_t mask) {
  return _mm256_cvtepu8_epi32(
      _mm_loadl_epi64(reinterpret_cast<const __m128i*>(kBitIndexes.rows[mask])));
}

// Moves the lanes of `mask` (below 256) to the front.
inline Floats CompressFloats(Floats x, uint32_t mask) {
  return _mm256_permutevar8x32_ps(x, BitIndexes(mask));
}

inline Words CompressWords(Words x, uint32_t mask) {
  return _mm256_permutevar8x32_epi32(x, BitIndexes(mask));
}

// The same for eight bytes, which are read from `from` and written to `to`.
inline void CompressBytes(const uint8_t* from, uint32_t mask, uint8_t* to) {
  const __m128i indexes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(kBitIndexes.rows[mask]));
  const __m128i eight = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(to), _mm_shuffle_epi8(eight, indexes));
}

// Returns the lanes whose index is below `count`.
inline Lanes FirstLanes(size_t count) {
  alignas(32) static constexpr int32_t kLanes[16] = {-1, -1, -1, -1, -1, -1, -1, -1,
                                                     0,  0,  0,  0,  0,  0,  0,  0};
  return _mm256_castsi256_ps(
      _mm256_loadu_si256(reinterpret_cast<const __m256i*>(kLanes + 8 - (count < 8 ? count : 8))));
}

// The same as bits.
inline uint32_t FirstBits(size_t count) { return count < 8 ? (1u << count) - 1u : 0xFFu; }

// Loads min(count, 8) numbers; the other lanes are zeros and are not read.
inline Floats LoadFirst(const float* from, size_t count) {
  return count >= 8 ? _mm256_loadu_ps(from)
                    : _mm256_maskload_ps(from, _mm256_castps_si256(FirstLanes(count)));
}

inline void StoreFirst(float* to, size_t count, Floats x) {
  if (count >= 8) {
    _mm256_storeu_ps(to, x);
  } else {
    _mm256_maskstore_ps(to, _mm256_castps_si256(FirstLanes(count)), x);
  }
}

// Stores up to eight words; only the first `room` may be overwritten.
inline void StoreWords(uint32_t* to, size_t room, Words x) {
  if (room >= 8) {
    StoreWords(to, x);
  } else {
    _mm256_maskstore_epi32(reinterpret_cast<int*>(to), _mm256_castps_si256(FirstLanes(room)), x);
  }
}

}  // namespace
}  // namespace pqcached::kernels

#endif  // PQCACHED_KERNELS_BASE_SIMD_COMPRESS_AVX2_H_

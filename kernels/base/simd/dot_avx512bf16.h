// Dot products of bf16 rows with vdpbf16ps, which computes 32 products per instruction (an FMA
// computes 16) and reads the keys without conversion. The query is split into two bf16 parts, so
// that a product keeps 16 bits of it.
//
// Include only in files compiled for AVX-512 BF16; everything is local to the including file.
#ifndef PQCACHED_KERNELS_BASE_SIMD_DOT_AVX512BF16_H_
#define PQCACHED_KERNELS_BASE_SIMD_DOT_AVX512BF16_H_

#include "kernels/base/simd/simd_avx512.h"
// Vec must be included first: the next headers are written in terms of it.
#include "kernels/base/simd/dot_simd.h"

namespace pqcached::kernels {
namespace {

PQC_INLINE __m512bh AsBf16(__m512i bits) { return reinterpret_cast<__m512bh>(bits); }

// Loads elements [index, index + 32) of a row; `mask` limits the elements that are read.
PQC_INLINE __m512i LoadBits(const std::byte* row, uint32_t index) {
  return _mm512_loadu_si512(row + index * 2);
}
PQC_INLINE __m512i LoadBits(const std::byte* row, uint32_t index, __mmask32 mask) {
  return _mm512_maskz_loadu_epi16(mask, row + index * 2);
}

// Returns a mask with the low `count` of 32 bits set.
PQC_INLINE __mmask32 LowMask(uint32_t count) {
  return static_cast<__mmask32>((uint64_t{1} << count) - 1);
}

// Loads the first min(count, 16) floats; the rest are zeros.
PQC_INLINE __m512 LoadFloats(const float* from, uint32_t count) {
  return _mm512_maskz_loadu_ps(static_cast<__mmask16>(LowMask(count < 16 ? count : 16)), from);
}

// `kParts`: into how many bf16 numbers a query's elements are split. One part is for queries that
// are bf16 numbers already.
template <int kParts>
struct Bf16DotsOf {
  // Floats of a prepared query per 32 dims.
  static constexpr uint32_t kStepFloats = 16 * kParts;

  // Writes, for each 32 dims, 32 high parts and, with two parts, 32 low parts (the rounding errors
  // of the high parts).
  static void PrepareQuery(const float* query, uint32_t dim, float scale, float* to) {
    const __m512 factor = _mm512_set1_ps(scale);
    for (uint32_t i = 0; i < dim; i += 32, to += kStepFloats) {
      const __m512 first = _mm512_mul_ps(LoadFloats(query + i, dim - i), factor);
      const __m512 second = _mm512_mul_ps(
          i + 16 < dim ? LoadFloats(query + i + 16, dim - i - 16) : _mm512_setzero_ps(), factor);
      const __m512i high = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(second, first));
      _mm512_storeu_si512(to, high);
      if constexpr (kParts == 1) continue;
      const __m512 first_rest = _mm512_sub_ps(first, Vec::WidenBf16(_mm512_castsi512_si256(high)));
      const __m512 second_rest =
          _mm512_sub_ps(second, Vec::WidenBf16(_mm512_extracti64x4_epi64(high, 1)));
      _mm512_storeu_si512(to + 16,
                          reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(second_rest, first_rest)));
    }
  }

  template <int kQueries>
  PQC_INLINE void Tile(const float* queries, size_t query_stride, uint32_t key_dim,
                       const std::byte* const* rows, float* logits, size_t stride) {
    constexpr int kRows = 16 / kQueries;
    __m512 sums[16];
#pragma GCC unroll 16
    for (__m512& sum : sums) sum = _mm512_setzero_ps();
    uint32_t i = 0;
    for (; i + 32 <= key_dim; i += 32, queries += kStepFloats) {
      __m512i key[kRows];
#pragma GCC unroll 16
      for (int t = 0; t < kRows; ++t) key[t] = LoadBits(rows[t], i);
      AddProducts<kQueries>(queries, query_stride, key, sums);
    }
    if (i < key_dim) {
      __m512i key[kRows];
#pragma GCC unroll 16
      for (int t = 0; t < kRows; ++t) key[t] = LoadBits(rows[t], i, LowMask(key_dim - i));
      AddProducts<kQueries>(queries, query_stride, key, sums);
    }
    Vec::StoreSums<kQueries>(sums, logits, stride);
  }

  template <int kQueries>
  PQC_INLINE void AddProducts(const float* queries, size_t query_stride,
                              const __m512i (&key)[16 / kQueries], __m512 (&sums)[16]) {
    constexpr int kRows = 16 / kQueries;
#pragma GCC unroll 4
    for (int q = 0; q < kQueries; ++q) {
      const float* parts = queries + static_cast<size_t>(q) * query_stride;
      const __m512bh high = AsBf16(_mm512_loadu_si512(parts));
      const __m512bh low =
          AsBf16(kParts == 1 ? _mm512_setzero_si512() : _mm512_loadu_si512(parts + 16));
#pragma GCC unroll 16
      for (int t = 0; t < kRows; ++t) {
        __m512& sum = sums[q * kRows + t];
        sum = _mm512_dpbf16_ps(sum, AsBf16(key[t]), high);
        if constexpr (kParts == 2) sum = _mm512_dpbf16_ps(sum, AsBf16(key[t]), low);
      }
    }
  }
};

using Bf16Dots = Bf16DotsOf<2>;

// Returns whether numbers are bf16 numbers.
inline bool AreBf16(const float* values, size_t count) {
  uint32_t low_bits = 0;
  for (size_t i = 0; i < count; ++i) {
    uint32_t bits;
    __builtin_memcpy(&bits, values + i, sizeof(bits));
    low_bits |= bits & 0xffff;
  }
  return low_bits == 0;
}

}  // namespace
}  // namespace pqcached::kernels

#endif  // PQCACHED_KERNELS_BASE_SIMD_DOT_AVX512BF16_H_

// Attention of a tile of queries over bf16 rows with vdpbf16ps, which computes 32 products per
// instruction (an FMA computes 16). Queries that are bf16 numbers, as those of a model in bf16 are,
// take one such product per pair of elements; other queries are split into two bf16 parts.
#include "kernels/base/simd/dot_avx512bf16.h"
// Vec must be included first: the next header is written in terms of it.
#include "kernels/attend/attend_range_simd.h"

namespace pqcached::kernels {
namespace {

uint32_t BitsOf(float value) {
  uint32_t bits;
  __builtin_memcpy(&bits, &value, sizeof(bits));
  return bits;
}

float FloatOf(uint32_t bits) {
  float value;
  __builtin_memcpy(&value, &bits, sizeof(value));
  return value;
}

// Returns the nearest bf16 number in the upper half. REQUIRES: finite.
uint32_t RoundToBf16(float value) {
  const uint32_t bits = BitsOf(value);
  return (bits + 0x7fff + ((bits >> 16) & 1)) & 0xffff0000;
}

struct RangeBf16 {
  static constexpr uint32_t kPair = 2;
  static constexpr uint32_t kRowElementBytes = 2;

  PQC_INLINE __m512 AddProduct(__m512 a, __m512 b, __m512 sum) {
    return _mm512_dpbf16_ps(sum, AsBf16(_mm512_castps_si512(a)), AsBf16(_mm512_castps_si512(b)));
  }

  static uint32_t QueryParts(const float* queries, size_t count) {
    return AreBf16(queries, count) ? 1 : 2;
  }
  static void PackQuery(const float* query, uint32_t key_dim, uint32_t parts, float* lane) {
    float* const low = lane + size_t{key_dim / 2} * kLaneQueries;
    for (uint32_t i = 0; i < key_dim; i += 2) {
      const uint32_t first = RoundToBf16(query[i]);
      const uint32_t second = RoundToBf16(query[i + 1]);
      lane[i / 2 * kLaneQueries] = FloatOf(first >> 16 | second);
      if (parts == 1) continue;
      const uint32_t first_rest = RoundToBf16(query[i] - FloatOf(first));
      const uint32_t second_rest = RoundToBf16(query[i + 1] - FloatOf(second));
      low[i / 2 * kLaneQueries] = FloatOf(first_rest >> 16 | second_rest);
    }
  }

  // May write up to eight words behind the row's.
  PQC_INLINE void PackKey(const std::byte* row, uint32_t dim, float* to) {
    for (uint32_t i = 0; i < dim; i += 32) {
      const uint32_t left = dim - i;
      _mm512_storeu_si512(to + i / 2, LoadBits(row, i, LowMask(left < 32 ? left : 32)));
    }
  }
  // Interleaves the values of two rows, so that one product adds both.
  PQC_INLINE void PackValues(const std::byte* even, const std::byte* odd, uint32_t begin,
                             uint32_t dim, float* to) {
    const __m512i pairs = _mm512_add_epi32(
        _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15),
        _mm512_slli_epi32(
            _mm512_setr_epi32(32, 33, 34, 35, 36, 37, 38, 39, 40, 41, 42, 43, 44, 45, 46, 47), 16));
    const __m512i upper_pairs = _mm512_add_epi16(pairs, _mm512_set1_epi16(16));
    for (uint32_t i = 0; i < dim; i += 32) {
      const uint32_t left = dim - i;
      const __mmask32 mask = LowMask(left < 32 ? left : 32);
      const __m512i first = LoadBits(even, begin + i, mask);
      const __m512i second = LoadBits(odd, begin + i, mask);
      _mm512_storeu_si512(to + i, _mm512_permutex2var_epi16(first, pairs, second));
      if (left <= 16) break;
      _mm512_storeu_si512(to + i + 16, _mm512_permutex2var_epi16(first, upper_pairs, second));
    }
  }
  static void PackBlock(const RangeCall& call, const RangeBlock& block, const RangeWork& work) {
    for (uint32_t t = 0; t < block.padded_count(); ++t) {
      PackKey(block.rows[t], call.key_dim, work.keys + t * (call.key_dim / 2));
    }
    for (uint32_t t = 0; t < block.padded_count(); t += 2) {
      PackValues(block.rows[t], block.rows[t + 1], call.key_dim, call.value_dim,
                 work.values + t / 2 * call.value_dim);
    }
  }

  // Replaces logits [rows, kLaneQueries] of one vector by pairs of bf16 weights [rows / 2,
  // kLaneQueries].
  PQC_INLINE void Weigh(float* logits, uint32_t rows, __m512 base, __m512* sum, __m512* norm) {
    const __m512i interleave = _mm512_add_epi32(
        _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15),
        _mm512_slli_epi32(
            _mm512_setr_epi32(16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31), 16));
    const __m512bh ones = AsBf16(_mm512_set1_epi16(0x3f80));
    __m512 total = _mm512_setzero_ps();
    __m512 rounded_total = _mm512_setzero_ps();
    float* to = logits;
    for (uint32_t t = 0; t < rows; t += 2, logits += 2 * kLaneQueries, to += kLaneQueries) {
      const __m512 first = Exp(_mm512_loadu_ps(logits) - base);
      const __m512 second = Exp(_mm512_loadu_ps(logits + kLaneQueries) - base);
      total = _mm512_add_ps(total, _mm512_add_ps(first, second));
      const __m512i packed = _mm512_permutexvar_epi16(
          interleave, reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(second, first)));
      rounded_total = _mm512_dpbf16_ps(rounded_total, AsBf16(packed), ones);
      _mm512_storeu_si512(to, packed);
    }
    *sum = total;
    *norm = rounded_total;
  }
};

}  // namespace

void internal::AttendRangeAvx512Bf16(const RangeCall& call) { AttendRangeWith<RangeBf16>(call); }

}  // namespace pqcached::kernels

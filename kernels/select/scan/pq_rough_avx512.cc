// Lists of tokens by the scores of a group of heads, 16 tokens at a time.
#include <immintrin.h>

#include "kernels/select/scan/pq_rough_lanes_simd.h"
#include "kernels/select/scan/pq_rough_lanes_x86.h"

namespace pqcached::kernels {
namespace {

constexpr uint32_t kLanes = 16;

inline __mmask16 ValidLanes(uint32_t begin, uint32_t end) {
  return static_cast<__mmask16>(end - begin >= kLanes ? 0xFFFFu : (1u << (end - begin)) - 1u);
}

struct Machine : MachineX86 {
  struct Lanes16 {
    using Vector = __m512;
    static constexpr uint32_t kCount = 16;
    static Vector Load(const float* at) { return _mm512_load_ps(at); }
    static void Store(float* at, Vector x) { _mm512_storeu_ps(at, x); }
    static Four Sum(Vector x) {
      return Lanes8::Sum(_mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1)));
    }
    static Four Largest(Vector x) {
      return Lanes8::Largest(
          _mm256_max_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1)));
    }
  };

  static void Append(const float* scores, uint32_t count, uint32_t first_position, float least,
                     RoughList& list) {
    const __m512 bound = _mm512_set1_ps(least);
    const __m512i iota = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    // Local copies: the compiler must assume that a store could change the originals.
    uint32_t* const positions = list.positions;
    float* const listed = list.scores;
    uint32_t written = list.count;
    for (uint32_t i = 0; i < count; i += kLanes) {
      const __m512 x = _mm512_loadu_ps(scores + i);
      const __mmask16 mask = _mm512_mask_cmp_ps_mask(ValidLanes(i, count), x, bound, _CMP_GE_OQ);
      const __m512i position =
          _mm512_add_epi32(_mm512_set1_epi32(static_cast<int>(first_position + i)), iota);
      _mm512_storeu_si512(positions + written, _mm512_maskz_compress_epi32(mask, position));
      _mm512_storeu_ps(listed + written, _mm512_maskz_compress_ps(mask, x));
      written += static_cast<uint32_t>(__builtin_popcount(mask));
    }
    list.count = written;
  }
};

BandCount ListBand(const float* scores, uint32_t count, float low, float high, uint32_t* indices) {
  const __m512 low_bound = _mm512_set1_ps(low);
  const __m512 high_bound = _mm512_set1_ps(high);
  const __m512i iota = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  BandCount result = {0, 0};
  for (uint32_t i = 0; i < count; i += kLanes) {
    const __mmask16 lanes = ValidLanes(i, count);
    const __m512 x = _mm512_maskz_loadu_ps(lanes, scores + i);
    const __mmask16 above = _mm512_mask_cmp_ps_mask(lanes, x, high_bound, _CMP_GT_OQ);
    const __mmask16 not_low = _mm512_mask_cmp_ps_mask(lanes, x, low_bound, _CMP_GE_OQ);
    const auto band = static_cast<__mmask16>(not_low & ~above);
    const __m512i index = _mm512_add_epi32(_mm512_set1_epi32(static_cast<int>(i)), iota);
    _mm512_storeu_si512(indices + result.band, _mm512_maskz_compress_epi32(band, index));
    result.above += static_cast<uint32_t>(__builtin_popcount(above));
    result.band += static_cast<uint32_t>(__builtin_popcount(band));
  }
  return result;
}

void TakeAbove(const RoughList& list, float bound, uint32_t* positions, uint32_t capacity) {
  const __m512 least = _mm512_set1_ps(bound);
  uint32_t written = 0;
  for (uint32_t i = 0; i < list.count; i += kLanes) {
    const __mmask16 lanes = ValidLanes(i, list.count);
    const __m512 x = _mm512_maskz_loadu_ps(lanes, list.scores + i);
    const __mmask16 mask = _mm512_mask_cmp_ps_mask(lanes, x, least, _CMP_GT_OQ);
    const __m512i packed =
        _mm512_maskz_compress_epi32(mask, _mm512_maskz_loadu_epi32(lanes, list.positions + i));
    const __mmask16 room = written < capacity ? ValidLanes(written, capacity) : __mmask16{0};
    _mm512_mask_storeu_epi32(positions + written, room, packed);
    written += static_cast<uint32_t>(__builtin_popcount(mask));
  }
}

}  // namespace

const LaneOps kLaneOpsAvx512 = {
    .list = ListByLanes<Machine>, .list_band = ListBand, .take_above = TakeAbove};

}  // namespace pqcached::kernels

// Lists of tokens by the scores of a group of heads, eight tokens at a time.
#include <immintrin.h>

#include "kernels/base/simd/compress_avx2.h"
#include "kernels/select/scan/pq_rough_lanes_simd.h"

namespace pqcached::kernels {
namespace {

constexpr uint32_t kLanes = 8;

// Sixteen floats in two registers.
struct Pair {
  __m256 low;
  __m256 high;

  friend Pair operator+(Pair a, Pair b) { return {a.low + b.low, a.high + b.high}; }
  friend Pair operator*(Pair a, Pair b) { return {a.low * b.low, a.high * b.high}; }
  Pair& operator+=(Pair b) { return *this = *this + b; }
};

struct Machine {
  struct Lanes16 {
    using Vector = Pair;
    static constexpr uint32_t kCount = 16;
    static Vector Load(const float* at) { return {_mm256_load_ps(at), _mm256_load_ps(at + 8)}; }
    static void Store(float* at, Vector x) {
      _mm256_storeu_ps(at, x.low);
      _mm256_storeu_ps(at + 8, x.high);
    }
    static __m128 Sum(Vector x) { return Lanes8::Sum(_mm256_add_ps(x.low, x.high)); }
    static __m128 Largest(Vector x) { return Lanes8::Largest(_mm256_max_ps(x.low, x.high)); }
  };

  static void Append(const float* scores, uint32_t count, uint32_t first_position, float least,
                     RoughList& list) {
    const __m256 bound = _mm256_set1_ps(least);
    // Local copies: the compiler must assume that a store could change the originals.
    uint32_t* const positions = list.positions;
    float* const listed = list.scores;
    uint32_t written = list.count;
    for (uint32_t i = 0; i < count; i += kLanes) {
      const __m256 x = _mm256_loadu_ps(scores + i);
      const uint32_t mask = MaskBits(_mm256_cmp_ps(x, bound, _CMP_GE_OQ)) & FirstBits(count - i);
      const __m256i indexes = BitIndexes(mask);
      const __m256i base = _mm256_set1_epi32(static_cast<int>(first_position + i));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(positions + written),
                          _mm256_add_epi32(base, indexes));
      _mm256_storeu_ps(listed + written, _mm256_permutevar8x32_ps(x, indexes));
      written += BitCount(mask);
    }
    list.count = written;
  }
};

BandCount ListBand(const float* scores, uint32_t count, float low, float high, uint32_t* indices) {
  const __m256 low_bound = _mm256_set1_ps(low);
  const __m256 high_bound = _mm256_set1_ps(high);
  BandCount result = {0, 0};
  for (uint32_t i = 0; i < count; i += kLanes) {
    const uint32_t lanes = FirstBits(count - i);
    const __m256 x = LoadFirst(scores + i, count - i);
    const uint32_t above = MaskBits(_mm256_cmp_ps(x, high_bound, _CMP_GT_OQ)) & lanes;
    const uint32_t not_low = MaskBits(_mm256_cmp_ps(x, low_bound, _CMP_GE_OQ)) & lanes;
    const uint32_t band = not_low & ~above;
    const __m256i base = _mm256_set1_epi32(static_cast<int>(i));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(indices + result.band),
                        _mm256_add_epi32(base, BitIndexes(band)));
    result.above += BitCount(above);
    result.band += BitCount(band);
  }
  return result;
}

void TakeAbove(const RoughList& list, float bound, uint32_t* positions, uint32_t capacity) {
  const __m256 least = _mm256_set1_ps(bound);
  uint32_t written = 0;
  for (uint32_t i = 0; i < list.count; i += kLanes) {
    const uint32_t rest = list.count - i;
    const __m256 x = LoadFirst(list.scores + i, rest);
    const uint32_t mask = MaskBits(_mm256_cmp_ps(x, least, _CMP_GT_OQ)) & FirstBits(rest);
    // Positions may be read, as they may be written, beyond the list's end.
    const __m256i position =
        _mm256_loadu_si256(reinterpret_cast<const __m256i*>(list.positions + i));
    StoreWords(positions + written, capacity - written,
               _mm256_permutevar8x32_epi32(position, BitIndexes(mask)));
    written += BitCount(mask);
  }
}

}  // namespace

const LaneOps kLaneOpsAvx2 = {
    .list = ListByLanes<Machine>, .list_band = ListBand, .take_above = TakeAbove};

}  // namespace pqcached::kernels

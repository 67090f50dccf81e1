// The k-th largest value by tokens, over weighted cells.
//
// Uses bisection over a list that shrinks by compression. With many cells, a sample first gives a
// bracket, and all cells are read once. The compiler's vectoriser does not generate compression.
#include <immintrin.h>

#include "kernels/base/simd/float_key.h"
#include "kernels/select/cells/pq_cells.h"

namespace pqcached::kernels {
namespace {

constexpr size_t kLanes = 16;

struct WeightedCells {
  const float* values;
  const uint32_t* tokens;
  size_t count;  // a multiple of 16; padding has no tokens
};

uint32_t CountAtLeast(const WeightedCells& cells, float value) {
  const __m512 bound = _mm512_set1_ps(value);
  __m512i tokens = _mm512_setzero_si512();
  for (size_t i = 0; i < cells.count; i += kLanes) {
    const __mmask16 mask = _mm512_cmp_ps_mask(_mm512_loadu_ps(cells.values + i), bound, _CMP_GE_OQ);
    tokens = _mm512_mask_add_epi32(tokens, mask, tokens, _mm512_loadu_si512(cells.tokens + i));
  }
  return static_cast<uint32_t>(_mm512_reduce_add_epi32(tokens));
}

// An interval that contains the k-th largest value: at least k tokens have values at or above its
// low end, fewer than k at or above its high end.
struct Bracket {
  KeyInterval interval;
  WeightedCells cells;    // all cells in the interval, possibly more
  uint32_t above_list;    // tokens of values above all values in the list
  uint32_t above_high;    // tokens at or above the high end
  uint32_t at_least_low;  // tokens at or above the low end
};

struct Kept {
  WeightedCells cells;
  uint32_t tokens;
  uint32_t above;  // tokens at or above high
};

// Keeps the cells with tokens and low <= value < high. May run in place, because it never writes
// ahead of its reads.
Kept Keep(const WeightedCells& cells, float low, float high, float* values, uint32_t* tokens) {
  const __m512 low_bound = _mm512_set1_ps(low);
  const __m512 high_bound = _mm512_set1_ps(high);
  __m512i above_sum = _mm512_setzero_si512();
  __m512i kept_sum = _mm512_setzero_si512();
  size_t kept = 0;
  for (size_t i = 0; i < cells.count; i += kLanes) {
    const __m512 value = _mm512_loadu_ps(cells.values + i);
    const __m512i n = _mm512_loadu_si512(cells.tokens + i);
    const __mmask16 not_low = _mm512_cmp_ps_mask(value, low_bound, _CMP_GE_OQ);
    const __mmask16 above = _mm512_cmp_ps_mask(value, high_bound, _CMP_GE_OQ);
    const __mmask16 mask =
        _mm512_mask_test_epi32_mask(static_cast<__mmask16>(not_low & ~above), n, n);
    above_sum = _mm512_mask_add_epi32(above_sum, above, above_sum, n);
    kept_sum = _mm512_mask_add_epi32(kept_sum, mask, kept_sum, n);
    _mm512_storeu_ps(values + kept, _mm512_maskz_compress_ps(mask, value));
    _mm512_storeu_si512(tokens + kept, _mm512_maskz_compress_epi32(mask, n));
    kept += static_cast<uint32_t>(__builtin_popcount(mask));
  }
  const size_t padded = (kept + kLanes - 1) / kLanes * kLanes;
  const auto padding = static_cast<__mmask16>((1u << (padded - kept)) - 1u);
  _mm512_mask_storeu_ps(values + kept, padding, _mm512_setzero_ps());
  _mm512_mask_storeu_epi32(tokens + kept, padding, _mm512_setzero_si512());
  return {.cells = {values, tokens, padded},
          .tokens = static_cast<uint32_t>(_mm512_reduce_add_epi32(kept_sum)),
          .above = static_cast<uint32_t>(_mm512_reduce_add_epi32(above_sum))};
}

Bracket BracketAll(const WeightedCells& cells) {
  __m512 least = _mm512_set1_ps(3e38f);
  __m512 largest = _mm512_set1_ps(-3e38f);
  __m512i sum = _mm512_setzero_si512();
  for (size_t i = 0; i < cells.count; i += kLanes) {
    const __m512 value = _mm512_loadu_ps(cells.values + i);
    const __m512i n = _mm512_loadu_si512(cells.tokens + i);
    const __mmask16 mask = _mm512_test_epi32_mask(n, n);
    least = _mm512_mask_min_ps(least, mask, least, value);
    largest = _mm512_mask_max_ps(largest, mask, largest, value);
    sum = _mm512_add_epi32(sum, n);
  }
  return {.interval = {FloatKey(_mm512_reduce_min_ps(least)),
                       FloatKey(_mm512_reduce_max_ps(largest)) + 1},
          .cells = cells,
          .above_list = 0,
          .above_high = 0,
          .at_least_low = static_cast<uint32_t>(_mm512_reduce_add_epi32(sum))};
}

// Halves the interval.
void Bisect(Bracket& bracket, uint32_t k, bool by_value) {
  const int32_t middle = MiddleKey(bracket.interval, by_value);
  const uint32_t at_least = bracket.above_list + CountAtLeast(bracket.cells, KeyFloat(middle));
  if (at_least >= k) {
    bracket.interval.low = middle;
    bracket.at_least_low = at_least;
  } else {
    bracket.interval.high = middle;
    bracket.above_high = at_least;
  }
}

// Lists up to this length are ordered by comparing every pair of cells.
constexpr size_t kCountedCells = 2 * kLanes;

CellThreshold FindByCounting(const Bracket& bracket, uint32_t k) {
  const WeightedCells& cells = bracket.cells;
  const __m512 value_0 = _mm512_loadu_ps(cells.values);
  const __m512 value_1 = cells.count > kLanes ? _mm512_loadu_ps(cells.values + kLanes) : value_0;
  __m512i at_least_0 = _mm512_set1_epi32(static_cast<int>(bracket.above_list));
  __m512i at_least_1 = at_least_0;
  for (size_t i = 0; i < cells.count; ++i) {
    const __m512 value = _mm512_set1_ps(cells.values[i]);
    const __m512i n = _mm512_set1_epi32(static_cast<int>(cells.tokens[i]));
    at_least_0 = _mm512_mask_add_epi32(at_least_0, _mm512_cmp_ps_mask(value_0, value, _CMP_LE_OQ),
                                       at_least_0, n);
    at_least_1 = _mm512_mask_add_epi32(at_least_1, _mm512_cmp_ps_mask(value_1, value, _CMP_LE_OQ),
                                       at_least_1, n);
  }
  const __m512i enough = _mm512_set1_epi32(static_cast<int>(k));
  const __m512 least = _mm512_set1_ps(-3e38f);
  const __m512 found_0 =
      _mm512_mask_mov_ps(least, _mm512_cmpge_epu32_mask(at_least_0, enough), value_0);
  const __m512 found_1 =
      _mm512_mask_mov_ps(least, _mm512_cmpge_epu32_mask(at_least_1, enough), value_1);
  const float value = _mm512_reduce_max_ps(_mm512_max_ps(found_0, found_1));
  const __m512 bound = _mm512_set1_ps(value);
  __m512i above = _mm512_setzero_si512();
  for (size_t i = 0; i < cells.count; i += kLanes) {
    const __mmask16 mask = _mm512_cmp_ps_mask(_mm512_loadu_ps(cells.values + i), bound, _CMP_GT_OQ);
    above = _mm512_mask_add_epi32(above, mask, above, _mm512_loadu_si512(cells.tokens + i));
  }
  return {value, bracket.above_list + static_cast<uint32_t>(_mm512_reduce_add_epi32(above))};
}

CellThreshold FindIn(Bracket bracket, uint32_t k, float* kept_values, uint32_t* kept_tokens) {
  uint32_t list_tokens = bracket.at_least_low - bracket.above_list;
  for (bool by_value = true; bracket.interval.high - int64_t{bracket.interval.low} > 1;
       by_value = !by_value) {
    if (bracket.cells.count <= kCountedCells) return FindByCounting(bracket, k);
    Bisect(bracket, k, by_value);
    const uint32_t rest = bracket.at_least_low - bracket.above_high;
    if (rest <= list_tokens / 3) {
      bracket.cells = Keep(bracket.cells, KeyFloat(bracket.interval.low),
                           KeyFloat(bracket.interval.high), kept_values, kept_tokens)
                          .cells;
      bracket.above_list = bracket.above_high;
      list_tokens = rest;
    }
  }
  return {KeyFloat(bracket.interval.low), bracket.above_high};
}

// Smallest number of cells for which one of 16 is sampled.
constexpr size_t kMinSampled = 2048;
constexpr size_t kSampleStride = 16;

// Samples one cell of each run of 16, at a place that shifts from run to run, so that sums of a row
// entry and a column entry are sampled evenly.
WeightedCells Sample(const WeightedCells& cells, float* values, uint32_t* tokens) {
  const size_t count = cells.count / kSampleStride;
  const __m512i lane = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  for (size_t i = 0; i < count; i += kLanes) {
    const __m512i index = _mm512_add_epi32(_mm512_set1_epi32(static_cast<int>(i)), lane);
    const __m512i place = _mm512_mullo_epi32(_mm512_srli_epi32(index, 2), _mm512_set1_epi32(7));
    const __m512i cell = _mm512_or_si512(_mm512_slli_epi32(index, 4),
                                         _mm512_and_si512(place, _mm512_set1_epi32(15)));
    _mm512_storeu_ps(values + i, _mm512_i32gather_ps(cell, cells.values, 4));
    _mm512_storeu_si512(tokens + i, _mm512_i32gather_epi32(cell, cells.tokens, 4));
  }
  return {values, tokens, count};
}

// Computes a bracket from a sample plus a margin. The bracket has no cells if the sample was
// misleading.
Bracket BracketBySample(const WeightedCells& cells, uint32_t all_tokens, uint32_t k,
                        float* kept_values, uint32_t* kept_tokens) {
  Bracket sample = BracketAll(Sample(cells, kept_values, kept_tokens));
  const auto sampled = static_cast<float>(sample.at_least_low);
  const float share = static_cast<float>(k) / static_cast<float>(all_tokens);
  const float rank = share * sampled;
  const float margin =
      _mm_cvtss_f32(_mm_sqrt_ss(_mm_set_ss(share * (1.0f - share)))) * sampled / 8.0f;
  float low = -3e38f;
  float high = 3e38f;
  for (bool by_value = true; sample.interval.high - int64_t{sample.interval.low} > 1;
       by_value = !by_value) {
    const auto at_least = static_cast<float>(sample.at_least_low);
    const auto above = static_cast<float>(sample.above_high);
    if (at_least >= rank + margin && at_least < sampled) low = KeyFloat(sample.interval.low);
    if (above <= rank - margin && above > 0.0f) high = KeyFloat(sample.interval.high);
    if (at_least - above <= margin) break;
    Bisect(sample, static_cast<uint32_t>(rank) + 1, by_value);
  }
  const Kept kept = Keep(cells, low, high, kept_values, kept_tokens);
  const bool sample_missed = kept.above >= k || kept.above + kept.tokens < k;
  // The smallest and largest values that were kept are a tighter bracket than the sample's.
  Bracket bracket = BracketAll({kept_values, kept_tokens, sample_missed ? 0 : kept.cells.count});
  bracket.above_list = kept.above;
  bracket.above_high = kept.above;
  bracket.at_least_low = kept.above + kept.tokens;
  return bracket;
}

}  // namespace

CellThreshold FindCellThresholdAvx512(const float* values, const uint32_t* tokens, size_t count,
                                      uint32_t all_tokens, uint32_t k, uint32_t* work) {
  auto* const kept_values = reinterpret_cast<float*>(work);
  uint32_t* const kept_tokens = work + count;
  const WeightedCells cells = {values, tokens, count};
  if (count >= kMinSampled) {
    const Bracket bracket = BracketBySample(cells, all_tokens, k, kept_values, kept_tokens);
    if (bracket.cells.count > 0) return FindIn(bracket, k, kept_values, kept_tokens);
  }
  return FindIn(BracketAll(cells), k, kept_values, kept_tokens);
}

}  // namespace pqcached::kernels

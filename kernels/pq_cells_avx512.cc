// Arithmetic over arrays of cells, 16 floats at a time.
//
// The compiler's vectoriser takes neither the compression in the search for the threshold nor sums
// of floats.
#include <immintrin.h>

#include "kernels/float_key_avx512.h"
#include "kernels/pq_cells.h"
#include "kernels/simd_exp_avx512.h"

namespace pqcached::kernels {
namespace {

constexpr size_t kLanes = 16;

void AddOuter(const float* row, uint32_t n0, const float* column, uint32_t n1, float* out) {
  for (uint32_t c0 = 0; c0 < n0; ++c0) {
    const __m512 first = _mm512_set1_ps(row[c0]);
    for (uint32_t c1 = 0; c1 < n1; c1 += kLanes) {
      _mm512_storeu_ps(out + c0 * n1 + c1, _mm512_add_ps(first, _mm512_loadu_ps(column + c1)));
    }
  }
}

float Largest(const float* values, const uint32_t* tokens, size_t count, float least) {
  __m512 largest = _mm512_set1_ps(least);
  for (size_t i = 0; i < count; i += kLanes) {
    const __m512i n = _mm512_loadu_si512(tokens + i);
    largest = _mm512_mask_max_ps(largest, _mm512_test_epi32_mask(n, n), largest,
                                 _mm512_loadu_ps(values + i));
  }
  return _mm512_reduce_max_ps(largest);
}

double Weigh(float* values, const uint32_t* tokens, size_t count, float max) {
  const __m512 offset = _mm512_set1_ps(max);
  __m512 sums[4] = {_mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps(),
                    _mm512_setzero_ps()};
  for (size_t i = 0; i < count; i += kLanes) {
    const __m512 weight = ExpAvx512(_mm512_sub_ps(_mm512_loadu_ps(values + i), offset));
    const __m512 n = _mm512_cvtepi32_ps(_mm512_loadu_si512(tokens + i));
    __m512& sum = sums[i / kLanes % 4];
    sum = _mm512_fmadd_ps(weight, n, sum);
    _mm512_storeu_ps(values + i, weight);
  }
  double total = 0.0;
  for (const __m512 sum : sums) total += static_cast<double>(_mm512_reduce_add_ps(sum));
  return total;
}

void AddScaled(const float* weights, float scale, size_t count, float* sums) {
  const __m512 factor = _mm512_set1_ps(scale);
  for (size_t i = 0; i < count; i += kLanes) {
    const __m512 sum =
        _mm512_fmadd_ps(factor, _mm512_loadu_ps(weights + i), _mm512_loadu_ps(sums + i));
    _mm512_storeu_ps(sums + i, sum);
  }
}

void RaiseTo(const float* values, float max, float log_sum, size_t count, float* largest) {
  const __m512 offset = _mm512_set1_ps(max);
  const __m512 shift = _mm512_set1_ps(log_sum);
  for (size_t i = 0; i < count; i += kLanes) {
    const __m512 value = _mm512_sub_ps(_mm512_sub_ps(_mm512_loadu_ps(values + i), offset), shift);
    _mm512_storeu_ps(largest + i, _mm512_max_ps(value, _mm512_loadu_ps(largest + i)));
  }
}

struct WeightedCells {
  const float* values;
  const uint32_t* tokens;
  size_t count;  // a multiple of 16; padding has no tokens
};

struct Tally {
  uint32_t tokens;
  uint32_t cells;
};

Tally CountAtLeast(const WeightedCells& cells, float value) {
  const __m512 bound = _mm512_set1_ps(value);
  __m512i tokens = _mm512_setzero_si512();
  uint32_t cell_count = 0;
  for (size_t i = 0; i < cells.count; i += kLanes) {
    const __mmask16 mask = _mm512_cmp_ps_mask(_mm512_loadu_ps(cells.values + i), bound, _CMP_GE_OQ);
    tokens = _mm512_mask_add_epi32(tokens, mask, tokens, _mm512_loadu_si512(cells.tokens + i));
    cell_count += static_cast<uint32_t>(__builtin_popcount(mask));
  }
  return {static_cast<uint32_t>(_mm512_reduce_add_epi32(tokens)), cell_count};
}

// Keeps the cells with tokens and low <= value < high. In place is fine: it writes behind what it
// reads.
WeightedCells Keep(const WeightedCells& cells, float low, float high, float* values,
                   uint32_t* tokens) {
  const __m512 low_bound = _mm512_set1_ps(low);
  const __m512 high_bound = _mm512_set1_ps(high);
  size_t kept = 0;
  for (size_t i = 0; i < cells.count; i += kLanes) {
    const __m512 value = _mm512_loadu_ps(cells.values + i);
    const __m512i n = _mm512_loadu_si512(cells.tokens + i);
    const __mmask16 not_low = _mm512_cmp_ps_mask(value, low_bound, _CMP_GE_OQ);
    const __mmask16 in_range = _mm512_mask_cmp_ps_mask(not_low, value, high_bound, _CMP_LT_OQ);
    const __mmask16 mask = _mm512_mask_test_epi32_mask(in_range, n, n);
    _mm512_storeu_ps(values + kept, _mm512_maskz_compress_ps(mask, value));
    _mm512_storeu_si512(tokens + kept, _mm512_maskz_compress_epi32(mask, n));
    kept += static_cast<uint32_t>(__builtin_popcount(mask));
  }
  const size_t padded = (kept + kLanes - 1) / kLanes * kLanes;
  const auto padding = static_cast<__mmask16>((1u << (padded - kept)) - 1u);
  _mm512_mask_storeu_ps(values + kept, padding, _mm512_setzero_ps());
  _mm512_mask_storeu_epi32(tokens + kept, padding, _mm512_setzero_si512());
  return {values, tokens, padded};
}

float Least(const WeightedCells& cells) {
  __m512 least = _mm512_set1_ps(3e38f);
  for (size_t i = 0; i < cells.count; i += kLanes) {
    const __m512i n = _mm512_loadu_si512(cells.tokens + i);
    least = _mm512_mask_min_ps(least, _mm512_test_epi32_mask(n, n), least,
                               _mm512_loadu_ps(cells.values + i));
  }
  return _mm512_reduce_min_ps(least);
}

// Bisects between low (k tokens or more from it on) and high (fewer); the list of cells in between
// shrinks.
CellThreshold FindCellThreshold(const float* values, const uint32_t* tokens, size_t count,
                                uint32_t k, uint32_t* work) {
  WeightedCells cells = {values, tokens, count};
  uint32_t above_list = 0;  // tokens of larger values than any in the list
  uint32_t above_high = 0;  // tokens at high or above
  KeyInterval interval = {FloatKey(Least(cells)),
                          FloatKey(Largest(values, tokens, count, -3e38f)) + 1};
  for (bool by_value = true; interval.high - int64_t{interval.low} > 1; by_value = !by_value) {
    const int32_t middle = MiddleKey(interval, by_value);
    const Tally tally = CountAtLeast(cells, KeyFloat(middle));
    const bool enough = above_list + tally.tokens >= k;
    if (enough) {
      interval.low = middle;
    } else {
      interval.high = middle;
      above_high = above_list + tally.tokens;
    }
    const size_t rest = enough ? tally.cells : cells.count - tally.cells;
    if (cells.count > kLanes && rest <= cells.count / 2) {
      cells = Keep(cells, KeyFloat(interval.low), KeyFloat(interval.high),
                   reinterpret_cast<float*>(work), work + count);
      above_list = above_high;
    }
  }
  return {KeyFloat(interval.low), above_high};
}

void Rank(const float* entries, uint32_t count, uint8_t* rank) {
  for (uint32_t i = 0; i < count; ++i) {
    const __m512 entry = _mm512_set1_ps(entries[i]);
    uint32_t larger = 0;
    for (uint32_t j = 0; j < count; j += kLanes) {
      const __mmask16 mask = _mm512_cmp_ps_mask(_mm512_loadu_ps(entries + j), entry, _CMP_GT_OQ);
      larger += static_cast<uint32_t>(__builtin_popcount(mask));
    }
    rank[i] = static_cast<uint8_t>(larger);
  }
}

void CountBits(const uint8_t* rows, uint32_t row_count, uint32_t row_bytes, uint8_t* counts) {
  for (uint32_t row = 0; row < row_count; ++row) {
    uint64_t bits = 0;
    __builtin_memcpy(&bits, rows + row * row_bytes, row_bytes);
    counts[row] = static_cast<uint8_t>(__builtin_popcountll(bits));
  }
}

void Compare(const float* values, size_t count, float threshold, uint8_t* at_least,
             uint8_t* above) {
  const __m512 bound = _mm512_set1_ps(threshold);
  for (size_t i = 0; i < count; i += kLanes) {
    const __m512 value = _mm512_loadu_ps(values + i);
    const __mmask16 at_least_bits = _mm512_cmp_ps_mask(value, bound, _CMP_GE_OQ);
    const __mmask16 above_bits = _mm512_cmp_ps_mask(value, bound, _CMP_GT_OQ);
    __builtin_memcpy(at_least + i / 8, &at_least_bits, 2);
    __builtin_memcpy(above + i / 8, &above_bits, 2);
  }
}

}  // namespace

const CellOps kCellOpsAvx512 = {.add_outer = AddOuter,
                                .largest = Largest,
                                .weigh = Weigh,
                                .add_scaled = AddScaled,
                                .raise_to = RaiseTo,
                                .find_threshold = FindCellThreshold,
                                .rank = Rank,
                                .count_bits = CountBits,
                                .compare = Compare};

}  // namespace pqcached::kernels

// Arithmetic over arrays of cells, 16 floats at a time.
//
// Written by hand because the compiler's vectoriser does not handle sums of floats.
#include <immintrin.h>

#include "kernels/base/simd/simd_exp_avx512.h"
#include "kernels/select/cells/pq_cells.h"

namespace pqcached::kernels {
namespace {

constexpr size_t kLanes = 16;
constexpr size_t kListLanes = 32;
constexpr size_t kListsAhead = 512;  // prefetch distance in entries

void AddCounts(const uint32_t* from, size_t count, uint32_t* to) {
  for (size_t i = 0; i < count; i += kLanes) {
    const __m512i sum = _mm512_add_epi32(_mm512_loadu_si512(to + i), _mm512_loadu_si512(from + i));
    _mm512_storeu_si512(to + i, sum);
  }
}

// Returns the entries from place `i` on, limited to `count`, summed over kLists lists.
template <uint32_t kLists>
__m512i SumBegins(const uint16_t* const* begins, size_t i, size_t count) {
  const size_t rest = i < count ? count - i : 0;
  const auto lanes = static_cast<__mmask32>(rest >= kListLanes ? ~0u : (1u << rest) - 1u);
  __m512i sum = _mm512_maskz_loadu_epi16(lanes, begins[0] + i);
  for (uint32_t list = 1; list < kLists; ++list) {
    sum = _mm512_add_epi16(sum, _mm512_maskz_loadu_epi16(lanes, begins[list] + i));
  }
  return sum;
}

// Uses differences of sums instead of sums of differences; both are equal as long as they fit into
// 16 bits.
template <uint32_t kLists>
void AddListCountsOf(const uint16_t* const* begins, size_t count, uint32_t* to) {
  alignas(64) static constexpr uint16_t kNext[kListLanes] = {
      1,  2,  3,  4,  5,  6,  7,  8,  9,  10, 11, 12, 13, 14, 15, 16,
      17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31, 32};
  const __m512i next = _mm512_load_si512(kNext);
  __m512i begin = SumBegins<kLists>(begins, 0, count + 1);
  for (size_t i = 0; i < count; i += kListLanes) {
    for (uint32_t list = 0; list < kLists; ++list) {
      __builtin_prefetch(begins[list] + i + kListsAhead, 0, 2);
    }
    const __m512i behind = SumBegins<kLists>(begins, i + kListLanes, count + 1);
    const __m512i n = _mm512_sub_epi16(_mm512_permutex2var_epi16(begin, next, behind), begin);
    begin = behind;
    const __m512i first = _mm512_cvtepu16_epi32(_mm512_castsi512_si256(n));
    _mm512_storeu_si512(to + i, _mm512_add_epi32(_mm512_loadu_si512(to + i), first));
    if (i + kLanes >= count) return;
    uint32_t* const rest = to + i + kLanes;
    const __m512i second = _mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(n, 1));
    _mm512_storeu_si512(rest, _mm512_add_epi32(_mm512_loadu_si512(rest), second));
  }
}

void AddListCounts(const uint16_t* const* begins, uint32_t list_count, size_t count, uint32_t* to) {
  if (list_count == kMaxSummedLists) return AddListCountsOf<kMaxSummedLists>(begins, count, to);
  for (uint32_t i = 0; i < list_count; ++i) AddListCountsOf<1>(begins + i, count, to);
}

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

EntryRange Range(const float* entries, uint32_t count) {
  __m512 least = _mm512_loadu_ps(entries);
  __m512 largest = least;
  for (uint32_t i = kLanes; i < count; i += kLanes) {
    least = _mm512_min_ps(least, _mm512_loadu_ps(entries + i));
    largest = _mm512_max_ps(largest, _mm512_loadu_ps(entries + i));
  }
  return {_mm512_reduce_min_ps(least), _mm512_reduce_max_ps(largest)};
}

void Exponentials(const float* entries, uint32_t count, float max, float* exponentials) {
  const __m512 offset = _mm512_set1_ps(max);
  for (uint32_t i = 0; i < count; i += kLanes) {
    const __m512 below = _mm512_sub_ps(_mm512_loadu_ps(entries + i), offset);
    _mm512_storeu_ps(exponentials + i, ExpAvx512(below));
  }
}

// Number of rows of cells that are summed as floats before the sum is added to doubles.
constexpr uint32_t kFlushRows = 8;

double SumProducts(const CellFactors& factors, const uint32_t* tokens) {
  const uint32_t n0 = factors.n0;
  const uint32_t n1 = factors.n1;
  const float* const column = factors.columns;
  double total = 0.0;
  for (uint32_t begin = 0; begin < n0; begin += kFlushRows) {
    const uint32_t end = n0 - begin < kFlushRows ? n0 : begin + kFlushRows;
    __m512 sum = _mm512_setzero_ps();
    for (uint32_t c0 = begin; c0 < end; ++c0) {
      __m512 row_sum = _mm512_setzero_ps();
      for (uint32_t c1 = 0; c1 < n1; c1 += kLanes) {
        const __m512 n = _mm512_cvtepi32_ps(_mm512_loadu_si512(tokens + c0 * n1 + c1));
        row_sum = _mm512_fmadd_ps(n, _mm512_loadu_ps(column + c1), row_sum);
      }
      sum = _mm512_fmadd_ps(row_sum, _mm512_set1_ps(factors.rows[c0]), sum);
    }
    total += static_cast<double>(_mm512_reduce_add_ps(sum));
  }
  return total;
}

// Sets or adds to values the products of kHeads heads.
template <uint32_t kHeads>
void AddProductsOf(const CellFactors& factors, bool first, float* values) {
  const uint32_t n1 = factors.n1;
  for (uint32_t c1 = 0; c1 < n1; c1 += kLanes) {
    __m512 columns[kHeads];
    for (uint32_t head = 0; head < kHeads; ++head) {
      columns[head] = _mm512_loadu_ps(factors.columns + head * factors.column_stride + c1);
    }
    for (uint32_t c0 = 0; c0 < factors.n0; ++c0) {
      float* const out = values + c0 * n1 + c1;
      __m512 sum = first ? _mm512_setzero_ps() : _mm512_loadu_ps(out);
      for (uint32_t head = 0; head < kHeads; ++head) {
        const __m512 row = _mm512_set1_ps(factors.rows[head * factors.row_stride + c0]);
        sum = _mm512_fmadd_ps(row, columns[head], sum);
      }
      _mm512_storeu_ps(out, sum);
    }
  }
}

void AddProducts(const CellFactors& factors, uint32_t head_count, float* values) {
  CellFactors rest = factors;
  for (uint32_t head = 0; head < head_count;) {
    const uint32_t heads = head_count - head >= 4 ? 4 : 1;
    if (heads == 4) {
      AddProductsOf<4>(rest, head == 0, values);
    } else {
      AddProductsOf<1>(rest, head == 0, values);
    }
    rest.rows += heads * rest.row_stride;
    rest.columns += heads * rest.column_stride;
    head += heads;
  }
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

void Compare(const float* values, const uint32_t* tokens, size_t count, float threshold,
             uint8_t* at_least, uint8_t* above) {
  const __m512 bound = _mm512_set1_ps(threshold);
  for (size_t i = 0; i < count; i += kLanes) {
    const __m512 value = _mm512_loadu_ps(values + i);
    const __m512i n = _mm512_loadu_si512(tokens + i);
    const __mmask16 equal_bits = _mm512_cmp_ps_mask(value, bound, _CMP_EQ_OQ);
    const __mmask16 above_bits = _mm512_cmp_ps_mask(value, bound, _CMP_GT_OQ);
    const auto at_least_bits =
        static_cast<__mmask16>(above_bits | _mm512_mask_test_epi32_mask(equal_bits, n, n));
    __builtin_memcpy(at_least + i / 8, &at_least_bits, 2);
    __builtin_memcpy(above + i / 8, &above_bits, 2);
  }
}

}  // namespace

const CellOps kCellOpsAvx512 = {.add_counts = AddCounts,
                                .add_list_counts = AddListCounts,
                                .add_outer = AddOuter,
                                .largest = Largest,
                                .weigh = Weigh,
                                .range = Range,
                                .exponentials = Exponentials,
                                .sum_products = SumProducts,
                                .add_products = AddProducts,
                                .add_scaled = AddScaled,
                                .update_max = RaiseTo,
                                .find_threshold = FindCellThresholdAvx512,
                                .rank = Rank,
                                .count_bits = CountBits,
                                .compare = Compare};

}  // namespace pqcached::kernels

// Arithmetic over arrays of cells, eight floats at a time.
//
// Written by hand because the compiler's vectoriser does not handle sums of floats.
#include <immintrin.h>

#include "kernels/base/simd/compress_avx2.h"
#include "kernels/base/simd/float_key_x86.h"
#include "kernels/base/simd/simd_avx2.h"
#include "kernels/base/simd/simd_exp_avx2.h"
#include "kernels/select/cells/pq_cells.h"

namespace pqcached::kernels {
namespace {

constexpr size_t kLanes = 8;

__m256i LoadWords(const uint32_t* from) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
}

void StoreAllWords(uint32_t* to, __m256i words) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), words);
}

uint32_t SumOfWords(__m256i words) {
  __m128i sum = _mm_add_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
  sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0x4E));
  sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0xB1));
  return static_cast<uint32_t>(_mm_cvtsi128_si32(sum));
}

// Returns the lanes of the mask in which n is not zero.
__m256 WithTokens(__m256i n, __m256 mask) {
  return _mm256_andnot_ps(_mm256_castsi256_ps(_mm256_cmpeq_epi32(n, _mm256_setzero_si256())), mask);
}

__m256 AllLanes() { return _mm256_castsi256_ps(_mm256_set1_epi32(-1)); }

void AddCounts(const uint32_t* from, size_t count, uint32_t* to) {
  for (size_t i = 0; i < count; i += kLanes) {
    StoreAllWords(to + i, _mm256_add_epi32(LoadWords(to + i), LoadWords(from + i)));
  }
}

void AddListCounts(const uint16_t* const* begins, uint32_t list_count, size_t count, uint32_t* to) {
  for (uint32_t list = 0; list < list_count; ++list) {
    const uint16_t* const own = begins[list];
    for (size_t i = 0; i < count; i += kLanes) {
      const __m128i begin = _mm_loadu_si128(reinterpret_cast<const __m128i*>(own + i));
      const __m128i end = _mm_loadu_si128(reinterpret_cast<const __m128i*>(own + i + 1));
      const __m256i n = _mm256_cvtepu16_epi32(_mm_sub_epi16(end, begin));
      StoreAllWords(to + i, _mm256_add_epi32(LoadWords(to + i), n));
    }
  }
}

void AddOuter(const float* row, uint32_t n0, const float* column, uint32_t n1, float* out) {
  for (uint32_t c0 = 0; c0 < n0; ++c0) {
    const __m256 first = Vec::Set(row[c0]);
    for (uint32_t c1 = 0; c1 < n1; c1 += kLanes) {
      Vec::Store(out + c0 * n1 + c1, _mm256_add_ps(first, Vec::Load(column + c1)));
    }
  }
}

float Largest(const float* values, const uint32_t* tokens, size_t count, float least) {
  const __m256 none = Vec::Set(least);
  __m256 largest = none;
  for (size_t i = 0; i < count; i += kLanes) {
    const __m256 counted = WithTokens(LoadWords(tokens + i), AllLanes());
    largest = Vec::Max(largest, _mm256_blendv_ps(none, Vec::Load(values + i), counted));
  }
  return Vec::Largest(largest);
}

double Weigh(float* values, const uint32_t* tokens, size_t count, float max) {
  const __m256 offset = Vec::Set(max);
  __m256 sums[2] = {_mm256_setzero_ps(), _mm256_setzero_ps()};
  for (size_t i = 0; i < count; i += 2 * kLanes) {
    for (size_t half = 0; half < 2; ++half) {
      const size_t at = i + half * kLanes;
      const __m256 weight = ExpAvx2(_mm256_sub_ps(Vec::Load(values + at), offset));
      // Token counts are below 2^31.
      sums[half] = Vec::MulAdd(weight, _mm256_cvtepi32_ps(LoadWords(tokens + at)), sums[half]);
      Vec::Store(values + at, weight);
    }
  }
  return double{Vec::Sum(sums[0])} + double{Vec::Sum(sums[1])};
}

EntryRange Range(const float* entries, uint32_t count) {
  __m256 least = Vec::Load(entries);
  __m256 largest = least;
  for (uint32_t i = kLanes; i < count; i += kLanes) {
    least = Vec::Min(least, Vec::Load(entries + i));
    largest = Vec::Max(largest, Vec::Load(entries + i));
  }
  return {-Vec::Largest(_mm256_sub_ps(_mm256_setzero_ps(), least)), Vec::Largest(largest)};
}

void Exponentials(const float* entries, uint32_t count, float max, float* exponentials) {
  const __m256 offset = Vec::Set(max);
  for (uint32_t i = 0; i < count; i += kLanes) {
    Vec::Store(exponentials + i, ExpAvx2(_mm256_sub_ps(Vec::Load(entries + i), offset)));
  }
}

double SumProducts(const CellFactors& factors, const uint32_t* tokens) {
  double total = 0.0;
  for (uint32_t c0 = 0; c0 < factors.n0; ++c0) {
    __m256 sum = _mm256_setzero_ps();
    for (uint32_t c1 = 0; c1 < factors.n1; c1 += kLanes) {
      const __m256 n = _mm256_cvtepi32_ps(LoadWords(tokens + c0 * factors.n1 + c1));
      sum = Vec::MulAdd(n, Vec::Load(factors.columns + c1), sum);
    }
    total += double{Vec::Sum(sum)} * double{factors.rows[c0]};
  }
  return total;
}

// Sets or adds to values the products of kHeads heads.
template <uint32_t kHeads>
void AddProductsOf(const CellFactors& factors, bool first, float* values) {
  const uint32_t n1 = factors.n1;
  for (uint32_t c1 = 0; c1 < n1; c1 += kLanes) {
    __m256 columns[kHeads];
    for (uint32_t head = 0; head < kHeads; ++head) {
      columns[head] = Vec::Load(factors.columns + head * factors.column_stride + c1);
    }
    for (uint32_t c0 = 0; c0 < factors.n0; ++c0) {
      float* const out = values + c0 * n1 + c1;
      __m256 sum = first ? _mm256_setzero_ps() : Vec::Load(out);
      for (uint32_t head = 0; head < kHeads; ++head) {
        sum =
            Vec::MulAdd(Vec::Set(factors.rows[head * factors.row_stride + c0]), columns[head], sum);
      }
      Vec::Store(out, sum);
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
  for (size_t i = 0; i < count; i += kLanes) {
    Vec::Store(sums + i, Vec::MulAdd(Vec::Set(scale), Vec::Load(weights + i), Vec::Load(sums + i)));
  }
}

void RaiseTo(const float* values, float max, float log_sum, size_t count, float* largest) {
  const __m256 offset = Vec::Set(max);
  const __m256 shift = Vec::Set(log_sum);
  for (size_t i = 0; i < count; i += kLanes) {
    const __m256 value = _mm256_sub_ps(_mm256_sub_ps(Vec::Load(values + i), offset), shift);
    Vec::Store(largest + i, Vec::Max(value, Vec::Load(largest + i)));
  }
}

// Cells with values and tokens; the count is a multiple of eight, and padding has no tokens.
struct WeightedCells {
  const float* values;
  const uint32_t* tokens;
  size_t count;
};

// Interval of keys that contains the k-th largest value, and the tokens at or above its ends.
struct Bracket {
  KeyInterval interval;
  uint32_t at_least_low;
  uint32_t above_high;
};

uint32_t CountAtLeast(const WeightedCells& cells, float value) {
  const __m256 bound = Vec::Set(value);
  __m256i tokens = _mm256_setzero_si256();
  for (size_t i = 0; i < cells.count; i += kLanes) {
    const __m256 mask = _mm256_cmp_ps(Vec::Load(cells.values + i), bound, _CMP_GE_OQ);
    tokens = _mm256_add_epi32(
        tokens, _mm256_and_si256(_mm256_castps_si256(mask), LoadWords(cells.tokens + i)));
  }
  return SumOfWords(tokens);
}

// Returns the cells with tokens and low <= value < high, copied to `values` and `tokens`. May run
// in place, because it never writes ahead of its reads.
WeightedCells Keep(const WeightedCells& cells, float low, float high, float* values,
                   uint32_t* tokens) {
  const __m256 low_bound = Vec::Set(low);
  const __m256 high_bound = Vec::Set(high);
  size_t kept = 0;
  for (size_t i = 0; i < cells.count; i += kLanes) {
    const __m256 value = Vec::Load(cells.values + i);
    const __m256i n = LoadWords(cells.tokens + i);
    const __m256 inside = _mm256_and_ps(_mm256_cmp_ps(value, low_bound, _CMP_GE_OQ),
                                        _mm256_cmp_ps(value, high_bound, _CMP_LT_OQ));
    const uint32_t mask = MaskBits(WithTokens(n, inside));
    const __m256i indexes = BitIndexes(mask);
    Vec::Store(values + kept, _mm256_permutevar8x32_ps(value, indexes));
    StoreAllWords(tokens + kept, _mm256_permutevar8x32_epi32(n, indexes));
    kept += BitCount(mask);
  }
  for (; kept % kLanes != 0; ++kept) {
    values[kept] = 0.0f;
    tokens[kept] = 0;
  }
  return {values, tokens, kept};
}

Bracket BracketAll(const WeightedCells& cells) {
  __m256 negated_least = Vec::Set(-3e38f);
  __m256 largest = negated_least;
  __m256i sum = _mm256_setzero_si256();
  for (size_t i = 0; i < cells.count; i += kLanes) {
    const __m256 value = Vec::Load(cells.values + i);
    const __m256i n = LoadWords(cells.tokens + i);
    const __m256 counted = WithTokens(n, AllLanes());
    const __m256 none = Vec::Set(-3e38f);
    const __m256 negated = _mm256_sub_ps(_mm256_setzero_ps(), value);
    negated_least = Vec::Max(negated_least, _mm256_blendv_ps(none, negated, counted));
    largest = Vec::Max(largest, _mm256_blendv_ps(none, value, counted));
    sum = _mm256_add_epi32(sum, n);
  }
  return {.interval = {FloatKey(-Vec::Largest(negated_least)), FloatKey(Vec::Largest(largest)) + 1},
          .at_least_low = SumOfWords(sum),
          .above_high = 0};
}

// Halves the interval; the list of cells is shortened whenever most of its tokens are outside.
CellThreshold FindCellThreshold(const float* values, const uint32_t* tokens, size_t count, uint32_t,
                                uint32_t k, uint32_t* work) {
  WeightedCells cells = {values, tokens, count};
  Bracket bracket = BracketAll(cells);
  uint32_t above_list = 0;  // tokens of values above all values in the list
  uint32_t list_tokens = bracket.at_least_low;
  for (bool by_value = true; bracket.interval.high - int64_t{bracket.interval.low} > 1;
       by_value = !by_value) {
    const int32_t middle = MiddleKey(bracket.interval, by_value);
    const uint32_t at_least = above_list + CountAtLeast(cells, KeyFloat(middle));
    if (at_least >= k) {
      bracket.interval.low = middle;
      bracket.at_least_low = at_least;
    } else {
      bracket.interval.high = middle;
      bracket.above_high = at_least;
    }
    const uint32_t rest = bracket.at_least_low - bracket.above_high;
    if (rest > list_tokens / 2 || cells.count <= 2 * kLanes) continue;
    cells = Keep(cells, KeyFloat(bracket.interval.low), KeyFloat(bracket.interval.high),
                 reinterpret_cast<float*>(work), work + count);
    above_list = bracket.above_high;
    list_tokens = rest;
  }
  return {KeyFloat(bracket.interval.low), bracket.above_high};
}

void Rank(const float* entries, uint32_t count, uint8_t* rank) {
  for (uint32_t i = 0; i < count; i += kLanes) {
    const __m256 entry = Vec::Load(entries + i);
    __m256i larger = _mm256_setzero_si256();
    for (uint32_t j = 0; j < count; ++j) {
      const __m256 mask = _mm256_cmp_ps(Vec::Set(entries[j]), entry, _CMP_GT_OQ);
      larger = _mm256_sub_epi32(larger, _mm256_castps_si256(mask));
    }
    alignas(32) uint32_t counts[kLanes];
    _mm256_store_si256(reinterpret_cast<__m256i*>(counts), larger);
    for (uint32_t lane = 0; lane < kLanes; ++lane) {
      rank[i + lane] = static_cast<uint8_t>(counts[lane]);
    }
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
  const __m256 bound = Vec::Set(threshold);
  for (size_t i = 0; i < count; i += kLanes) {
    const __m256 value = Vec::Load(values + i);
    const __m256 equal = _mm256_cmp_ps(value, bound, _CMP_EQ_OQ);
    const uint32_t above_bits = MaskBits(_mm256_cmp_ps(value, bound, _CMP_GT_OQ));
    const uint32_t tied_bits = MaskBits(WithTokens(LoadWords(tokens + i), equal));
    at_least[i / 8] = static_cast<uint8_t>(above_bits | tied_bits);
    above[i / 8] = static_cast<uint8_t>(above_bits);
  }
}

}  // namespace

const CellOps kCellOpsAvx2 = {.add_counts = AddCounts,
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
                              .find_threshold = FindCellThreshold,
                              .rank = Rank,
                              .count_bits = CountBits,
                              .compare = Compare};

}  // namespace pqcached::kernels

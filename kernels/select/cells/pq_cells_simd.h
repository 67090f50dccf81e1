// Arithmetic over arrays of cells, eight floats at a time, written once for AVX2 and NEON.
//
// Written by hand because the compiler's vectoriser does not handle sums of floats.
//
// Include only in instruction-set files, behind compress_*.h, simd_*.h and simd_exp_*.h of one
// instruction set; the anonymous namespace keeps every copy local to its file.
#ifndef PQCACHED_KERNELS_SELECT_CELLS_PQ_CELLS_SIMD_H_
#define PQCACHED_KERNELS_SELECT_CELLS_PQ_CELLS_SIMD_H_

#include "kernels/base/simd/float_key.h"
#include "kernels/select/cells/pq_cells.h"

namespace pqcached::kernels {
namespace {

constexpr size_t kLanes = 8;

void AddCounts(const uint32_t* from, size_t count, uint32_t* to) {
  for (size_t i = 0; i < count; i += kLanes) {
    StoreWords(to + i, AddWords(LoadWords(to + i), LoadWords(from + i)));
  }
}

void AddListCounts(const uint16_t* const* begins, uint32_t list_count, size_t count, uint32_t* to) {
  for (uint32_t list = 0; list < list_count; ++list) {
    const uint16_t* const own = begins[list];
    for (size_t i = 0; i < count; i += kLanes) {
      const Words n = SubtractHalves(own + i + 1, own + i);
      StoreWords(to + i, AddWords(LoadWords(to + i), n));
    }
  }
}

void AddOuter(const float* row, uint32_t n0, const float* column, uint32_t n1, float* out) {
  for (uint32_t c0 = 0; c0 < n0; ++c0) {
    const Floats first = Vec::Set(row[c0]);
    for (uint32_t c1 = 0; c1 < n1; c1 += kLanes) {
      Vec::Store(out + c0 * n1 + c1, first + Vec::Load(column + c1));
    }
  }
}

float Largest(const float* values, const uint32_t* tokens, size_t count, float least) {
  const Floats none = Vec::Set(least);
  Floats largest = none;
  for (size_t i = 0; i < count; i += kLanes) {
    const Lanes counted = NotZero(LoadWords(tokens + i), AllLanes());
    largest = Vec::Max(largest, Choose(counted, Vec::Load(values + i), none));
  }
  return Vec::Largest(largest);
}

double Weigh(float* values, const uint32_t* tokens, size_t count, float max) {
  const Floats offset = Vec::Set(max);
  Floats sums[2] = {Vec::Set(0.0f), Vec::Set(0.0f)};
  for (size_t i = 0; i < count; i += 2 * kLanes) {
    for (size_t half = 0; half < 2; ++half) {
      const size_t at = i + half * kLanes;
      const Floats weight = ExpFloats(Vec::Load(values + at) - offset);
      // Token counts are below 2^31.
      sums[half] = Vec::MulAdd(weight, ToFloats(LoadWords(tokens + at)), sums[half]);
      Vec::Store(values + at, weight);
    }
  }
  return double{Vec::Sum(sums[0])} + double{Vec::Sum(sums[1])};
}

EntryRange Range(const float* entries, uint32_t count) {
  Floats least = Vec::Load(entries);
  Floats largest = least;
  for (uint32_t i = kLanes; i < count; i += kLanes) {
    least = Vec::Min(least, Vec::Load(entries + i));
    largest = Vec::Max(largest, Vec::Load(entries + i));
  }
  return {-Vec::Largest(Vec::Set(0.0f) - least), Vec::Largest(largest)};
}

void Exponentials(const float* entries, uint32_t count, float max, float* exponentials) {
  const Floats offset = Vec::Set(max);
  for (uint32_t i = 0; i < count; i += kLanes) {
    Vec::Store(exponentials + i, ExpFloats(Vec::Load(entries + i) - offset));
  }
}

double SumProducts(const CellFactors& factors, const uint32_t* tokens) {
  double total = 0.0;
  for (uint32_t c0 = 0; c0 < factors.n0; ++c0) {
    Floats sum = Vec::Set(0.0f);
    for (uint32_t c1 = 0; c1 < factors.n1; c1 += kLanes) {
      const Floats n = ToFloats(LoadWords(tokens + c0 * factors.n1 + c1));
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
    Floats columns[kHeads];
    for (uint32_t head = 0; head < kHeads; ++head) {
      columns[head] = Vec::Load(factors.columns + head * factors.column_stride + c1);
    }
    for (uint32_t c0 = 0; c0 < factors.n0; ++c0) {
      float* const out = values + c0 * n1 + c1;
      Floats sum = first ? Vec::Set(0.0f) : Vec::Load(out);
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
  const Floats offset = Vec::Set(max);
  const Floats shift = Vec::Set(log_sum);
  for (size_t i = 0; i < count; i += kLanes) {
    const Floats value = Vec::Load(values + i) - offset - shift;
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
  const Floats bound = Vec::Set(value);
  Words tokens = SetWords(0);
  for (size_t i = 0; i < cells.count; i += kLanes) {
    const Lanes mask = AtLeast(Vec::Load(cells.values + i), bound);
    tokens = AddWords(tokens, Choose(mask, LoadWords(cells.tokens + i)));
  }
  return SumOfWords(tokens);
}

// Returns the cells with tokens and low <= value < high, copied to `values` and `tokens`. May run
// in place, because it never writes ahead of its reads.
WeightedCells Keep(const WeightedCells& cells, float low, float high, float* values,
                   uint32_t* tokens) {
  const Floats low_bound = Vec::Set(low);
  const Floats high_bound = Vec::Set(high);
  size_t kept = 0;
  for (size_t i = 0; i < cells.count; i += kLanes) {
    const Floats value = Vec::Load(cells.values + i);
    const Words n = LoadWords(cells.tokens + i);
    const Lanes inside = Both(AtLeast(value, low_bound), Above(high_bound, value));
    const uint32_t mask = MaskBits(NotZero(n, inside));
    Vec::Store(values + kept, CompressFloats(value, mask));
    StoreWords(tokens + kept, CompressWords(n, mask));
    kept += BitCount(mask);
  }
  for (; kept % kLanes != 0; ++kept) {
    values[kept] = 0.0f;
    tokens[kept] = 0;
  }
  return {values, tokens, kept};
}

Bracket BracketAll(const WeightedCells& cells) {
  Floats negated_least = Vec::Set(-3e38f);
  Floats largest = negated_least;
  Words sum = SetWords(0);
  for (size_t i = 0; i < cells.count; i += kLanes) {
    const Floats value = Vec::Load(cells.values + i);
    const Words n = LoadWords(cells.tokens + i);
    const Lanes counted = NotZero(n, AllLanes());
    const Floats none = Vec::Set(-3e38f);
    const Floats negated = Vec::Set(0.0f) - value;
    negated_least = Vec::Max(negated_least, Choose(counted, negated, none));
    largest = Vec::Max(largest, Choose(counted, value, none));
    sum = AddWords(sum, n);
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
    const Floats entry = Vec::Load(entries + i);
    Words larger = SetWords(0);
    for (uint32_t j = 0; j < count; ++j) {
      larger = CountLanes(larger, Above(Vec::Set(entries[j]), entry));
    }
    alignas(32) uint32_t counts[kLanes];
    StoreWords(counts, larger);
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
  const Floats bound = Vec::Set(threshold);
  for (size_t i = 0; i < count; i += kLanes) {
    const Floats value = Vec::Load(values + i);
    const uint32_t above_bits = MaskBits(Above(value, bound));
    const uint32_t tied_bits = MaskBits(NotZero(LoadWords(tokens + i), Equal(value, bound)));
    at_least[i / 8] = static_cast<uint8_t>(above_bits | tied_bits);
    above[i / 8] = static_cast<uint8_t>(above_bits);
  }
}

constexpr CellOps kCellOps = {.add_counts = AddCounts,
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

}  // namespace
}  // namespace pqcached::kernels

#endif  // PQCACHED_KERNELS_SELECT_CELLS_PQ_CELLS_SIMD_H_

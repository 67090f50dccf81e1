// Group rules, threshold and positions over plain value arrays, 16 floats at a time.
//
// The threshold is found by bisection over a shrinking list (compression) instead of nth_element,
// whose branches cost about 3 ns per token.
#include <immintrin.h>

#include "kernels/base/group_rule.h"
#include "kernels/base/simd/float_key_avx512.h"
#include "kernels/base/simd/simd_exp_avx512.h"
#include "kernels/select/value_ops.h"

namespace pqcached::kernels {
namespace {

constexpr size_t kLanes = 16;

// Number of floats that are summed before the lanes are added to the double sum.
constexpr size_t kFlushCount = 64 * kLanes;

__mmask16 LanesFrom(size_t i, size_t count) {
  const size_t rest = count - i;
  return static_cast<__mmask16>(rest >= kLanes ? 0xFFFFu : (1u << rest) - 1u);
}

// The order of the operands makes NaN become -kLogitLimit.
__m512 LoadLogits(__mmask16 lanes, const float* logits) {
  const __m512 low =
      _mm512_max_ps(_mm512_maskz_loadu_ps(lanes, logits), _mm512_set1_ps(-kLogitLimit));
  return _mm512_min_ps(low, _mm512_set1_ps(kLogitLimit));
}

float Largest(const float* logits, size_t count, float least) {
  __m512 largest = _mm512_set1_ps(least);
  for (size_t i = 0; i < count; i += kLanes) {
    const __mmask16 lanes = LanesFrom(i, count);
    largest = _mm512_mask_max_ps(largest, lanes, largest, LoadLogits(lanes, logits + i));
  }
  return _mm512_reduce_max_ps(largest);
}

double SumExponentials(const float* logits, size_t count, float max) {
  const __m512 offset = _mm512_set1_ps(max);
  double total = 0.0;
  for (size_t begin = 0; begin < count; begin += kFlushCount) {
    const size_t end = count - begin < kFlushCount ? count : begin + kFlushCount;
    __m512 sum = _mm512_setzero_ps();
    for (size_t i = begin; i < end; i += kLanes) {
      const __mmask16 lanes = LanesFrom(i, end);
      const __m512 weight = ExpAvx512(_mm512_sub_ps(LoadLogits(lanes, logits + i), offset));
      sum = _mm512_mask_add_ps(sum, lanes, sum, weight);
    }
    total += static_cast<double>(_mm512_reduce_add_ps(sum));
  }
  return total;
}

void AddSoftmax(const float* logits, size_t count, HeadWeight head, bool first, float* values) {
  const __m512 offset = _mm512_set1_ps(head.max);
  const __m512 scale = _mm512_set1_ps(head.inverse_sum);
  for (size_t i = 0; i < count; i += kLanes) {
    const __mmask16 lanes = LanesFrom(i, count);
    const __m512 weight = ExpAvx512(_mm512_sub_ps(LoadLogits(lanes, logits + i), offset));
    const __m512 old = first ? _mm512_setzero_ps() : _mm512_maskz_loadu_ps(lanes, values + i);
    _mm512_mask_storeu_ps(values + i, lanes, _mm512_fmadd_ps(weight, scale, old));
  }
}

void RaiseTo(const float* logits, size_t count, HeadWeight head, bool first, float* values) {
  const __m512 offset = _mm512_set1_ps(head.max);
  const __m512 shift = _mm512_set1_ps(head.log_sum);
  for (size_t i = 0; i < count; i += kLanes) {
    const __mmask16 lanes = LanesFrom(i, count);
    const __m512 logit = LoadLogits(lanes, logits + i);
    __m512 value = _mm512_sub_ps(_mm512_sub_ps(logit, offset), shift);
    if (!first) value = _mm512_max_ps(value, _mm512_maskz_loadu_ps(lanes, values + i));
    _mm512_mask_storeu_ps(values + i, lanes, value);
  }
}

void AddLogits(const float* logits, size_t count, bool first, float* values) {
  for (size_t i = 0; i < count; i += kLanes) {
    const __mmask16 lanes = LanesFrom(i, count);
    __m512 value = LoadLogits(lanes, logits + i);
    if (!first) value = _mm512_add_ps(_mm512_maskz_loadu_ps(lanes, values + i), value);
    _mm512_mask_storeu_ps(values + i, lanes, value);
  }
}

uint32_t CountAtLeast(const float* values, size_t count, float value) {
  const __m512 bound = _mm512_set1_ps(value);
  uint32_t at_least = 0;
  for (size_t i = 0; i < count; i += kLanes) {
    const __mmask16 lanes = LanesFrom(i, count);
    const __m512 x = _mm512_maskz_loadu_ps(lanes, values + i);
    at_least += static_cast<uint32_t>(
        __builtin_popcount(_mm512_mask_cmp_ps_mask(lanes, x, bound, _CMP_GE_OQ)));
  }
  return at_least;
}

struct Kept {
  size_t count;
  uint32_t above_count;  // values at or above high
};

// Keeps low <= value < high. May run in place, because it never writes ahead of its reads.
Kept Keep(const float* values, size_t count, float low, float high, float* kept) {
  const __m512 low_bound = _mm512_set1_ps(low);
  const __m512 high_bound = _mm512_set1_ps(high);
  Kept result = {0, 0};
  for (size_t i = 0; i < count; i += kLanes) {
    const __mmask16 lanes = LanesFrom(i, count);
    const __m512 x = _mm512_maskz_loadu_ps(lanes, values + i);
    const __mmask16 not_low = _mm512_mask_cmp_ps_mask(lanes, x, low_bound, _CMP_GE_OQ);
    const __mmask16 above = _mm512_mask_cmp_ps_mask(lanes, x, high_bound, _CMP_GE_OQ);
    const auto mask = static_cast<__mmask16>(not_low & ~above);
    const __m512 packed = _mm512_maskz_compress_ps(mask, x);
    // A whole register written in place must not pass the values already read: result.count <= i.
    if (i + kLanes <= count) {
      _mm512_storeu_ps(kept + result.count, packed);
    } else {
      _mm512_mask_storeu_ps(kept + result.count, lanes, packed);
    }
    result.count += static_cast<uint32_t>(__builtin_popcount(mask));
    result.above_count += static_cast<uint32_t>(__builtin_popcount(above));
  }
  return result;
}

// List of the values in an interval, and the number of values above it.
struct Bracket {
  KeyInterval interval;
  const float* list;
  size_t list_count;
  uint32_t above_count;
};

ValueCut FindCutIn(Bracket bracket, uint32_t k, float* work) {
  KeyInterval interval = bracket.interval;
  uint32_t above_list = bracket.above_count;  // values above all values in the list
  uint32_t above_high = bracket.above_count;  // values at or above high
  for (bool by_value = true; interval.high - int64_t{interval.low} > 1; by_value = !by_value) {
    const int32_t middle = MiddleKey(interval, by_value);
    const uint32_t at_least = CountAtLeast(bracket.list, bracket.list_count, KeyFloat(middle));
    const bool enough = above_list + at_least >= k;
    if (enough) {
      interval.low = middle;
    } else {
      interval.high = middle;
      above_high = above_list + at_least;
    }
    const size_t rest = enough ? at_least : bracket.list_count - at_least;
    if (bracket.list_count > kLanes && rest <= bracket.list_count / 2) {
      bracket.list_count = Keep(bracket.list, bracket.list_count, KeyFloat(interval.low),
                                KeyFloat(interval.high), work)
                               .count;
      bracket.list = work;
      above_list = above_high;
    }
  }
  return {KeyFloat(interval.low), above_high};
}

Bracket BracketAll(const float* values, size_t count) {
  __m512 least = _mm512_set1_ps(3e38f);
  __m512 largest = _mm512_set1_ps(-3e38f);
  for (size_t i = 0; i < count; i += kLanes) {
    const __mmask16 lanes = LanesFrom(i, count);
    const __m512 x = _mm512_maskz_loadu_ps(lanes, values + i);
    least = _mm512_mask_min_ps(least, lanes, least, x);
    largest = _mm512_mask_max_ps(largest, lanes, largest, x);
  }
  return {.interval = {FloatKey(_mm512_reduce_min_ps(least)),
                       FloatKey(_mm512_reduce_max_ps(largest)) + 1},
          .list = values,
          .list_count = count,
          .above_count = 0};
}

// Number of sampled values, taken in whole registers spread over the array. The sample's bracket
// saves all but one pass over the array.
constexpr size_t kSampleCount = 2048;
constexpr size_t kMinSampled = 4 * kSampleCount;

// Number of ranks by which the sample's bracket is widened: at least four standard deviations for
// values in random order. When neighbouring values are similar it may miss, and then the whole
// array is searched.
constexpr uint32_t kSampleMargin = 96;

// Brackets the k-th largest value with a sample; the list is empty if the sample was misleading.
Bracket BracketBySample(const float* values, size_t count, uint32_t k, float* work) {
  const size_t stride = count / (kSampleCount / kLanes);
  for (size_t i = 0; i < kSampleCount; i += kLanes) {
    _mm512_storeu_ps(work + i, _mm512_loadu_ps(values + i / kLanes * stride));
  }
  const auto rank = static_cast<uint32_t>(uint64_t{k} * kSampleCount / count);
  const Bracket sample = BracketAll(work, kSampleCount);
  float* const rest = work + kSampleCount;
  float high = 3e38f;
  if (rank > kSampleMargin) high = FindCutIn(sample, rank - kSampleMargin, rest).value;
  float low = -3e38f;
  if (rank + kSampleMargin <= kSampleCount) {
    low = FindCutIn(sample, rank + kSampleMargin, rest).value;
  }
  const Kept kept = Keep(values, count, low, high, work);
  const bool sample_missed = kept.above_count >= k || kept.above_count + kept.count < k;
  // The smallest and largest values that were kept are a tighter bracket than the sample's.
  Bracket bracket = BracketAll(work, sample_missed ? 0 : kept.count);
  bracket.above_count = kept.above_count;
  return bracket;
}

ValueCut FindCut(const float* values, size_t count, uint32_t k, float* work) {
  if (count >= kMinSampled) {
    const Bracket bracket = BracketBySample(values, count, k, work);
    if (bracket.list_count > 0) return FindCutIn(bracket, k, work);
  }
  return FindCutIn(BracketAll(values, count), k, work);
}

// Writes base + i for the `count` set bits of mask.
void Compress(__mmask16 mask, uint32_t count, uint32_t base, uint32_t* positions, uint32_t room) {
  const __m512i iota = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  const __m512i position = _mm512_add_epi32(_mm512_set1_epi32(static_cast<int>(base)), iota);
  // Compresses into a register first, because compression to memory is microcoded on Zen 4.
  const __m512i packed = _mm512_maskz_compress_epi32(mask, position);
  if (room >= kLanes) {
    _mm512_storeu_si512(positions, packed);
  } else {
    _mm512_mask_storeu_epi32(positions, static_cast<__mmask16>((1u << count) - 1u), packed);
  }
}

void Emit(EmitTask& task) {
  const __m512 threshold = _mm512_set1_ps(task.threshold);
  uint32_t written = task.written;
  uint32_t quota = task.equal_quota;
  for (uint32_t i = 0; i < task.count; i += kLanes) {
    const __mmask16 lanes = LanesFrom(i, task.count);
    const __m512 x = _mm512_maskz_loadu_ps(lanes, task.values + i);
    uint32_t mask = _mm512_mask_cmp_ps_mask(lanes, x, threshold, _CMP_GT_OQ);
    if (quota > 0) {
      uint32_t tied = _mm512_mask_cmp_ps_mask(lanes, x, threshold, _CMP_EQ_OQ);
      const auto tied_count = static_cast<uint32_t>(__builtin_popcount(tied));
      if (tied_count > quota) tied = _pdep_u32((1u << quota) - 1u, tied);
      quota -= tied_count > quota ? quota : tied_count;
      mask |= tied;
    }
    if (mask == 0) continue;
    const auto count = static_cast<uint32_t>(__builtin_popcount(mask));
    Compress(static_cast<__mmask16>(mask), count, task.first_position + i, task.positions + written,
             task.capacity - written);
    written += count;
  }
  task.written = written;
  task.equal_quota = quota;
}

}  // namespace

const ValueOps kValueOpsAvx512 = {.largest = Largest,
                                  .sum_exponentials = SumExponentials,
                                  .add_softmax = AddSoftmax,
                                  .update_max = RaiseTo,
                                  .add_logits = AddLogits,
                                  .find_cut = FindCut,
                                  .emit = Emit};

}  // namespace pqcached::kernels

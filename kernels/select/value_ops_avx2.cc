// Group rules, threshold and positions over plain value arrays, eight floats at a time.
#include <immintrin.h>

#include "kernels/base/group_rule.h"
#include "kernels/base/simd/compress_avx2.h"
#include "kernels/base/simd/simd_avx2.h"
#include "kernels/base/simd/simd_exp_avx2.h"
#include "kernels/select/value_cut_simd.h"
#include "kernels/select/value_ops.h"

namespace pqcached::kernels {
namespace {

constexpr size_t kLanes = 8;

// Number of floats that are summed before the lanes are added to the double sum.
constexpr size_t kFlushCount = 64 * kLanes;

// The order of the operands makes NaN become -kLogitLimit.
__m256 ClampedFirst(const float* logits, size_t count) {
  const __m256 low = _mm256_max_ps(LoadFirst(logits, count), _mm256_set1_ps(-kLogitLimit));
  return _mm256_min_ps(low, _mm256_set1_ps(kLogitLimit));
}

// Returns x in the first `count` lanes and `other` in the rest.
__m256 KeepFirst(__m256 x, size_t count, __m256 other) {
  return count >= kLanes ? x : _mm256_blendv_ps(other, x, _mm256_castsi256_ps(FirstLanes(count)));
}

float Largest(const float* logits, size_t count, float least) {
  __m256 largest = _mm256_set1_ps(least);
  for (size_t i = 0; i < count; i += kLanes) {
    const __m256 x = KeepFirst(ClampedFirst(logits + i, count - i), count - i, largest);
    largest = _mm256_max_ps(largest, x);
  }
  return Vec::Largest(largest);
}

double SumExponentials(const float* logits, size_t count, float max) {
  const __m256 offset = _mm256_set1_ps(max);
  double total = 0.0;
  for (size_t begin = 0; begin < count; begin += kFlushCount) {
    const size_t end = count - begin < kFlushCount ? count : begin + kFlushCount;
    __m256 sum = _mm256_setzero_ps();
    for (size_t i = begin; i < end; i += kLanes) {
      const __m256 weight = ExpAvx2(_mm256_sub_ps(ClampedFirst(logits + i, end - i), offset));
      sum = _mm256_add_ps(sum, KeepFirst(weight, end - i, _mm256_setzero_ps()));
    }
    total += static_cast<double>(Vec::Sum(sum));
  }
  return total;
}

void AddSoftmax(const float* logits, size_t count, HeadWeight head, bool first, float* values) {
  const __m256 offset = _mm256_set1_ps(head.max);
  const __m256 scale = _mm256_set1_ps(head.inverse_sum);
  for (size_t i = 0; i < count; i += kLanes) {
    const size_t rest = count - i;
    const __m256 weight = ExpAvx2(_mm256_sub_ps(ClampedFirst(logits + i, rest), offset));
    const __m256 old = first ? _mm256_setzero_ps() : LoadFirst(values + i, rest);
    StoreFirst(values + i, rest, _mm256_fmadd_ps(weight, scale, old));
  }
}

void RaiseTo(const float* logits, size_t count, HeadWeight head, bool first, float* values) {
  const __m256 offset = _mm256_set1_ps(head.max);
  const __m256 shift = _mm256_set1_ps(head.log_sum);
  for (size_t i = 0; i < count; i += kLanes) {
    const size_t rest = count - i;
    __m256 value = _mm256_sub_ps(_mm256_sub_ps(ClampedFirst(logits + i, rest), offset), shift);
    if (!first) value = _mm256_max_ps(value, LoadFirst(values + i, rest));
    StoreFirst(values + i, rest, value);
  }
}

void AddLogits(const float* logits, size_t count, bool first, float* values) {
  for (size_t i = 0; i < count; i += kLanes) {
    const size_t rest = count - i;
    __m256 value = ClampedFirst(logits + i, rest);
    if (!first) value = _mm256_add_ps(LoadFirst(values + i, rest), value);
    StoreFirst(values + i, rest, value);
  }
}

struct CutLoops {
  static uint32_t CountAtLeast(const float* values, size_t count, float value) {
    const __m256 bound = _mm256_set1_ps(value);
    uint32_t at_least = 0;
    for (size_t i = 0; i < count; i += kLanes) {
      const __m256 x = LoadFirst(values + i, count - i);
      at_least += BitCount(MaskBits(_mm256_cmp_ps(x, bound, _CMP_GE_OQ)) & FirstBits(count - i));
    }
    return at_least;
  }

  static Kept Keep(const float* values, size_t count, float low, float high, float* kept) {
    const __m256 low_bound = _mm256_set1_ps(low);
    const __m256 high_bound = _mm256_set1_ps(high);
    Kept result = {0, 0};
    for (size_t i = 0; i < count; i += kLanes) {
      const uint32_t lanes = FirstBits(count - i);
      const __m256 x = LoadFirst(values + i, count - i);
      const uint32_t not_low = MaskBits(_mm256_cmp_ps(x, low_bound, _CMP_GE_OQ)) & lanes;
      const uint32_t above = MaskBits(_mm256_cmp_ps(x, high_bound, _CMP_GE_OQ)) & lanes;
      const uint32_t mask = not_low & ~above;
      // A whole register written in place must not pass the values already read: result.count <= i.
      StoreFirst(kept + result.count, count - i, CompressFloats(x, mask));
      result.count += BitCount(mask);
      result.above_count += BitCount(above);
    }
    return result;
  }

  static KeyInterval Range(const float* values, size_t count) {
    __m256 least = _mm256_set1_ps(3e38f);
    __m256 largest = _mm256_set1_ps(-3e38f);
    for (size_t i = 0; i < count; i += kLanes) {
      const __m256 x = LoadFirst(values + i, count - i);
      least = _mm256_min_ps(least, KeepFirst(x, count - i, least));
      largest = _mm256_max_ps(largest, KeepFirst(x, count - i, largest));
    }
    const __m256 negated = _mm256_sub_ps(_mm256_setzero_ps(), least);
    return {FloatKey(-Vec::Largest(negated)), FloatKey(Vec::Largest(largest)) + 1};
  }
};

void Emit(EmitTask& task) {
  const __m256 threshold = _mm256_set1_ps(task.threshold);
  const __m256i iota = _mm256_set1_epi32(static_cast<int>(task.first_position));
  uint32_t written = task.written;
  uint32_t quota = task.equal_quota;
  for (uint32_t i = 0; i < task.count; i += kLanes) {
    const uint32_t lanes = FirstBits(task.count - i);
    const __m256 x = LoadFirst(task.values + i, task.count - i);
    uint32_t mask = MaskBits(_mm256_cmp_ps(x, threshold, _CMP_GT_OQ)) & lanes;
    if (quota > 0) {
      uint32_t tied = MaskBits(_mm256_cmp_ps(x, threshold, _CMP_EQ_OQ)) & lanes;
      const uint32_t tied_count = BitCount(tied);
      if (tied_count > quota) tied = _pdep_u32((1u << quota) - 1u, tied);
      quota -= tied_count > quota ? quota : tied_count;
      mask |= tied;
    }
    if (mask == 0) continue;
    const __m256i base = _mm256_add_epi32(iota, _mm256_set1_epi32(static_cast<int>(i)));
    StoreWords(task.positions + written, task.capacity - written,
               _mm256_add_epi32(base, BitIndexes(mask)));
    written += BitCount(mask);
  }
  task.written = written;
  task.equal_quota = quota;
}

}  // namespace

const ValueOps kValueOpsAvx2 = {.largest = Largest,
                                .sum_exponentials = SumExponentials,
                                .add_softmax = AddSoftmax,
                                .update_max = RaiseTo,
                                .add_logits = AddLogits,
                                .find_cut = FindCutByBisection<CutLoops>,
                                .emit = Emit};

}  // namespace pqcached::kernels

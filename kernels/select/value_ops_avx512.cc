// Group rules, threshold and positions over plain value arrays, 16 floats at a time.
#include <immintrin.h>

#include "kernels/base/group_rule.h"
#include "kernels/base/simd/simd_exp_avx512.h"
#include "kernels/select/value_cut_simd.h"
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

struct CutLoops {
  static uint32_t CountAtLeast(const float* values, size_t count, float value) {
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

  static Kept Keep(const float* values, size_t count, float low, float high, float* kept) {
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

  static KeyInterval Range(const float* values, size_t count) {
    __m512 least = _mm512_set1_ps(3e38f);
    __m512 largest = _mm512_set1_ps(-3e38f);
    for (size_t i = 0; i < count; i += kLanes) {
      const __mmask16 lanes = LanesFrom(i, count);
      const __m512 x = _mm512_maskz_loadu_ps(lanes, values + i);
      least = _mm512_mask_min_ps(least, lanes, least, x);
      largest = _mm512_mask_max_ps(largest, lanes, largest, x);
    }
    return {FloatKey(_mm512_reduce_min_ps(least)), FloatKey(_mm512_reduce_max_ps(largest)) + 1};
  }
};

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
                                  .find_cut = FindCutByBisection<CutLoops>,
                                  .emit = Emit};

}  // namespace pqcached::kernels

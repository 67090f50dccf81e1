// Group rules, threshold and positions over plain value arrays, eight floats at a time, written
// once for AVX2 and NEON.
//
// Include only in instruction-set files, behind compress_*.h, simd_*.h, simd_exp_*.h and
// take_quota_*.h of one instruction set; the anonymous namespace keeps every copy local to its
// file.
#ifndef PQCACHED_KERNELS_SELECT_VALUE_OPS_SIMD_H_
#define PQCACHED_KERNELS_SELECT_VALUE_OPS_SIMD_H_

#include "kernels/base/group_rule.h"
#include "kernels/select/value_cut_simd.h"
#include "kernels/select/value_ops.h"

namespace pqcached::kernels {
namespace {

constexpr size_t kLanes = 8;

// Number of floats that are summed before the lanes are added to the double sum.
constexpr size_t kFlushCount = 64 * kLanes;

// The order of the operands makes NaN become -kLogitLimit.
inline Floats ClampedFirst(const float* logits, size_t count) {
  const Floats low = Vec::Max(LoadFirst(logits, count), Vec::Set(-kLogitLimit));
  return Vec::Min(low, Vec::Set(kLogitLimit));
}

// Returns x in the first `count` lanes and `other` in the rest.
inline Floats KeepFirst(Floats x, size_t count, Floats other) {
  return count >= kLanes ? x : Choose(FirstLanes(count), x, other);
}

float Largest(const float* logits, size_t count, float least) {
  Floats largest = Vec::Set(least);
  for (size_t i = 0; i < count; i += kLanes) {
    const Floats x = KeepFirst(ClampedFirst(logits + i, count - i), count - i, largest);
    largest = Vec::Max(largest, x);
  }
  return Vec::Largest(largest);
}

double SumExponentials(const float* logits, size_t count, float max) {
  const Floats offset = Vec::Set(max);
  double total = 0.0;
  for (size_t begin = 0; begin < count; begin += kFlushCount) {
    const size_t end = count - begin < kFlushCount ? count : begin + kFlushCount;
    Floats sum = Vec::Set(0.0f);
    for (size_t i = begin; i < end; i += kLanes) {
      const Floats weight = ExpFloats(ClampedFirst(logits + i, end - i) - offset);
      sum = sum + KeepFirst(weight, end - i, Vec::Set(0.0f));
    }
    total += static_cast<double>(Vec::Sum(sum));
  }
  return total;
}

void AddSoftmax(const float* logits, size_t count, HeadWeight head, bool first, float* values) {
  const Floats offset = Vec::Set(head.max);
  const Floats scale = Vec::Set(head.inverse_sum);
  for (size_t i = 0; i < count; i += kLanes) {
    const size_t rest = count - i;
    const Floats weight = ExpFloats(ClampedFirst(logits + i, rest) - offset);
    const Floats old = first ? Vec::Set(0.0f) : LoadFirst(values + i, rest);
    StoreFirst(values + i, rest, Vec::MulAdd(weight, scale, old));
  }
}

void RaiseTo(const float* logits, size_t count, HeadWeight head, bool first, float* values) {
  const Floats offset = Vec::Set(head.max);
  const Floats shift = Vec::Set(head.log_sum);
  for (size_t i = 0; i < count; i += kLanes) {
    const size_t rest = count - i;
    Floats value = ClampedFirst(logits + i, rest) - offset - shift;
    if (!first) value = Vec::Max(value, LoadFirst(values + i, rest));
    StoreFirst(values + i, rest, value);
  }
}

void AddLogits(const float* logits, size_t count, bool first, float* values) {
  for (size_t i = 0; i < count; i += kLanes) {
    const size_t rest = count - i;
    Floats value = ClampedFirst(logits + i, rest);
    if (!first) value = LoadFirst(values + i, rest) + value;
    StoreFirst(values + i, rest, value);
  }
}

struct CutLoops {
  static uint32_t CountAtLeast(const float* values, size_t count, float value) {
    const Floats bound = Vec::Set(value);
    uint32_t at_least = 0;
    for (size_t i = 0; i < count; i += kLanes) {
      const Floats x = LoadFirst(values + i, count - i);
      at_least += BitCount(MaskBits(AtLeast(x, bound)) & FirstBits(count - i));
    }
    return at_least;
  }

  static Kept Keep(const float* values, size_t count, float low, float high, float* kept) {
    const Floats low_bound = Vec::Set(low);
    const Floats high_bound = Vec::Set(high);
    Kept result = {0, 0};
    for (size_t i = 0; i < count; i += kLanes) {
      const uint32_t lanes = FirstBits(count - i);
      const Floats x = LoadFirst(values + i, count - i);
      const uint32_t not_low = MaskBits(AtLeast(x, low_bound)) & lanes;
      const uint32_t above = MaskBits(AtLeast(x, high_bound)) & lanes;
      const uint32_t mask = not_low & ~above;
      // A whole register written in place must not pass the values already read: result.count <= i.
      StoreFirst(kept + result.count, count - i, CompressFloats(x, mask));
      result.count += BitCount(mask);
      result.above_count += BitCount(above);
    }
    return result;
  }

  static KeyInterval Range(const float* values, size_t count) {
    Floats least = Vec::Set(3e38f);
    Floats largest = Vec::Set(-3e38f);
    for (size_t i = 0; i < count; i += kLanes) {
      const Floats x = LoadFirst(values + i, count - i);
      least = Vec::Min(least, KeepFirst(x, count - i, least));
      largest = Vec::Max(largest, KeepFirst(x, count - i, largest));
    }
    const Floats negated = Vec::Set(0.0f) - least;
    return {FloatKey(-Vec::Largest(negated)), FloatKey(Vec::Largest(largest)) + 1};
  }
};

void Emit(EmitTask& task) {
  const Floats threshold = Vec::Set(task.threshold);
  uint32_t written = task.written;
  uint32_t quota = task.equal_quota;
  for (uint32_t i = 0; i < task.count; i += kLanes) {
    const uint32_t lanes = FirstBits(task.count - i);
    const Floats x = LoadFirst(task.values + i, task.count - i);
    uint32_t mask = MaskBits(Above(x, threshold)) & lanes;
    if (quota > 0) {
      const uint32_t tied = MaskBits(Equal(x, threshold)) & lanes;
      mask |= static_cast<uint32_t>(TakeQuota(tied, quota));
    }
    if (mask == 0) continue;
    const Words base = SetWords(task.first_position + i);
    StoreWords(task.positions + written, task.capacity - written, AddWords(base, BitIndexes(mask)));
    written += BitCount(mask);
  }
  task.written = written;
  task.equal_quota = quota;
}

constexpr ValueOps kValueOps = {.largest = Largest,
                                .sum_exponentials = SumExponentials,
                                .add_softmax = AddSoftmax,
                                .update_max = RaiseTo,
                                .add_logits = AddLogits,
                                .find_cut = FindCutByBisection<CutLoops>,
                                .emit = Emit};

}  // namespace
}  // namespace pqcached::kernels

#endif  // PQCACHED_KERNELS_SELECT_VALUE_OPS_SIMD_H_

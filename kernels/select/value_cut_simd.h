// ValueOps::find_cut by bisection over a shrinking list instead of nth_element, whose branches cost
// about 3 ns per token.
//
// The parameter `Ops` has the loops of one instruction set:
//   static uint32_t CountAtLeast(const float* values, size_t count, float value);
//   static Kept Keep(const float* values, size_t count, float low, float high, float* kept);
//   static KeyInterval Range(const float* values, size_t count);
// Include only in instruction-set files; the anonymous namespace keeps every copy local to its
// file.
#ifndef PQCACHED_KERNELS_SELECT_VALUE_CUT_SIMD_H_
#define PQCACHED_KERNELS_SELECT_VALUE_CUT_SIMD_H_

#include <cstddef>
#include <cstdint>

#include "kernels/base/simd/float_key.h"
#include "kernels/select/value_ops.h"

namespace pqcached::kernels {
namespace {

// Keep copies low <= value < high. It may run in place, because it never writes ahead of its reads.
struct Kept {
  size_t count;
  uint32_t above_count;  // values at or above high
};

// List of the values in an interval, and the number of values above it.
struct Bracket {
  KeyInterval interval;
  const float* list;
  size_t list_count;
  uint32_t above_count;
};

// Lists of at most this many values are not made shorter.
constexpr size_t kShortList = 16;

template <typename Ops>
ValueCut FindCutIn(Bracket bracket, uint32_t k, float* work) {
  KeyInterval interval = bracket.interval;
  uint32_t above_list = bracket.above_count;  // values above all values in the list
  uint32_t above_high = bracket.above_count;  // values at or above high
  for (bool by_value = true; interval.high - int64_t{interval.low} > 1; by_value = !by_value) {
    const int32_t middle = MiddleKey(interval, by_value);
    const uint32_t at_least = Ops::CountAtLeast(bracket.list, bracket.list_count, KeyFloat(middle));
    const bool enough = above_list + at_least >= k;
    if (enough) {
      interval.low = middle;
    } else {
      interval.high = middle;
      above_high = above_list + at_least;
    }
    const size_t rest = enough ? at_least : bracket.list_count - at_least;
    if (bracket.list_count > kShortList && rest <= bracket.list_count / 2) {
      bracket.list_count = Ops::Keep(bracket.list, bracket.list_count, KeyFloat(interval.low),
                                     KeyFloat(interval.high), work)
                               .count;
      bracket.list = work;
      above_list = above_high;
    }
  }
  return {KeyFloat(interval.low), above_high};
}

// Number of sampled values, taken in runs spread over the array. The sample's bracket saves all but
// one pass over the array.
constexpr size_t kSampleCount = 2048;
constexpr size_t kSampleRun = 16;
constexpr size_t kMinSampled = 4 * kSampleCount;

// Number of ranks by which the sample's bracket is widened: at least four standard deviations for
// values in random order. When neighbouring values are similar it may miss, and then the whole
// array is searched.
constexpr uint32_t kSampleMargin = 96;

// Brackets the k-th largest value with a sample; the list is empty if the sample was misleading.
template <typename Ops>
Bracket BracketBySample(const float* values, size_t count, uint32_t k, float* work) {
  const size_t stride = count / (kSampleCount / kSampleRun);
  for (size_t i = 0; i < kSampleCount; i += kSampleRun) {
    __builtin_memcpy(work + i, values + i / kSampleRun * stride, kSampleRun * sizeof(float));
  }
  const auto rank = static_cast<uint32_t>(uint64_t{k} * kSampleCount / count);
  const Bracket sample = {.interval = Ops::Range(work, kSampleCount),
                          .list = work,
                          .list_count = kSampleCount,
                          .above_count = 0};
  float* const rest = work + kSampleCount;
  float high = 3e38f;
  if (rank > kSampleMargin) high = FindCutIn<Ops>(sample, rank - kSampleMargin, rest).value;
  float low = -3e38f;
  if (rank + kSampleMargin <= kSampleCount) {
    low = FindCutIn<Ops>(sample, rank + kSampleMargin, rest).value;
  }
  const Kept kept = Ops::Keep(values, count, low, high, work);
  const bool sample_missed = kept.above_count >= k || kept.above_count + kept.count < k;
  // The smallest and largest values that were kept are a tighter bracket than the sample's.
  const size_t list_count = sample_missed ? 0 : kept.count;
  return {.interval = Ops::Range(work, list_count),
          .list = work,
          .list_count = list_count,
          .above_count = kept.above_count};
}

// Implements ValueOps::find_cut.
template <typename Ops>
ValueCut FindCutByBisection(const float* values, size_t count, uint32_t k, float* work) {
  if (count >= kMinSampled) {
    const Bracket bracket = BracketBySample<Ops>(values, count, k, work);
    if (bracket.list_count > 0) return FindCutIn<Ops>(bracket, k, work);
  }
  return FindCutIn<Ops>({.interval = Ops::Range(values, count),
                         .list = values,
                         .list_count = count,
                         .above_count = 0},
                        k, work);
}

}  // namespace
}  // namespace pqcached::kernels

#endif  // PQCACHED_KERNELS_SELECT_VALUE_CUT_SIMD_H_

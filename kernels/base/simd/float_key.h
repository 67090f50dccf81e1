// Order-preserving integer keys of floats, for bisection. Include only in instruction-set files;
// the functions are static, so that every copy is local to its file.
#ifndef PQCACHED_KERNELS_BASE_SIMD_FLOAT_KEY_H_
#define PQCACHED_KERNELS_BASE_SIMD_FLOAT_KEY_H_

#include <cstdint>

namespace pqcached::kernels {

static inline int32_t FloatKey(float value) {
  const int32_t bits = __builtin_bit_cast(int32_t, value);
  return bits ^ ((bits >> 31) & 0x7FFFFFFF);
}

static inline float KeyFloat(int32_t key) {
  const int32_t bits = key ^ ((key >> 31) & 0x7FFFFFFF);
  return __builtin_bit_cast(float, bits);
}

// Interval [low, high) of keys that contains the threshold.
struct KeyInterval {
  int32_t low;
  int32_t high;
};

// Returns a key strictly between low and high. REQUIRES: high - low > 1.
//
// Halving by key suits values of many magnitudes, halving by value suits values of few. Around zero
// neither is known to be better, so callers should alternate `by_value`.
static inline int32_t MiddleKey(KeyInterval interval, bool by_value) {
  const auto middle = static_cast<int32_t>((int64_t{interval.low} + interval.high) >> 1);
  const float low = KeyFloat(interval.low);
  const float high = KeyFloat(interval.high);
  if (low > 0.0f) by_value = high < 4.0f * low;
  if (high < 0.0f) by_value = low > 4.0f * high;
  if (!by_value) return middle;
  const int32_t key = FloatKey(0.5f * low + 0.5f * high);
  return key > interval.low && key < interval.high ? key : middle;
}

}  // namespace pqcached::kernels

#endif  // PQCACHED_KERNELS_BASE_SIMD_FLOAT_KEY_H_

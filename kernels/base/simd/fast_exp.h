// FastExp computes exp for softmax weights with operations that compilers vectorise.
#ifndef PQCACHED_KERNELS_BASE_SIMD_FAST_EXP_H_
#define PQCACHED_KERNELS_BASE_SIMD_FAST_EXP_H_

#include <bit>
#include <cstdint>

#include "kernels/base/group_rule.h"

namespace pqcached::kernels {

// ln 2 in two parts, so that exponent * part is exact for the first.
inline constexpr float kLog2E = 1.44269504f;
inline constexpr float kLn2High = 0.693359375f;
inline constexpr float kLn2Low = -2.12194440e-4f;

// Coefficients of exp(r) = 1 + r + r^2 (c0 + r (c1 + ...)) for |r| <= ln 2 / 2.
inline constexpr float kExpCoefficients[] = {5.0000001201e-1f, 1.6666665459e-1f, 4.1665795894e-2f,
                                             8.3334519073e-3f, 1.3981999507e-3f, 1.9875691500e-4f};

// Returns exp(x) with a relative error of at most 2e-7 for kMinExponent <= x <= 0, zero below and 1
// above.
inline float FastExp(float x) {
  const float not_low = x < kMinExponent ? kMinExponent : x;
  const float clipped = not_low > 0.0f ? 0.0f : not_low;
  // Rounds to nearest by adding 1.5 * 2^23.
  const float shifted = clipped * kLog2E + 12582912.0f;
  const float exponent = shifted - 12582912.0f;
  const float r = clipped - exponent * kLn2High - exponent * kLn2Low;
  float polynomial = kExpCoefficients[5];
  for (int i = 4; i >= 0; --i) polynomial = polynomial * r + kExpCoefficients[i];
  polynomial = polynomial * r * r + r + 1.0f;
  const auto power = static_cast<uint32_t>(static_cast<int32_t>(exponent) + 127) << 23u;
  return x < kMinExponent ? 0.0f : polynomial * std::bit_cast<float>(power);
}

}  // namespace pqcached::kernels

#endif  // PQCACHED_KERNELS_BASE_SIMD_FAST_EXP_H_

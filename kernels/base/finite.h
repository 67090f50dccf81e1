// Checks floats for NaN and infinity by their bits, which no compiler option changes.
#ifndef PQCACHED_KERNELS_BASE_FINITE_H_
#define PQCACHED_KERNELS_BASE_FINITE_H_

#include <bit>
#include <cstdint>
#include <span>

namespace pqcached::kernels {

inline bool IsFinite(float value) {
  constexpr uint32_t kExponent = 0x7f800000;
  return (std::bit_cast<uint32_t>(value) & kExponent) != kExponent;
}

inline bool AllFinite(std::span<const float> values) {
  bool finite = true;  // without an early end, so that the compiler uses vectors
  for (const float value : values) finite &= IsFinite(value);
  return finite;
}

}  // namespace pqcached::kernels

#endif  // PQCACHED_KERNELS_BASE_FINITE_H_

// Declarations shared by crc32c.cc and its instruction-set files, and private to them.
#ifndef PQCACHED_KERNELS_BASE_CRC32C_INTERNAL_H_
#define PQCACHED_KERNELS_BASE_CRC32C_INTERNAL_H_

#include <cstddef>
#include <cstdint>

namespace pqcached::kernels::internal {

inline constexpr uint32_t kCrc32cPolynomial = 0x82f63b78u;  // reflected

// Returns x^n modulo the polynomial, in reflected order and shifted by one bit: the factor that
// moves a reflected carry-less product n - 32 or n + 32 bits ahead (see Fold and Powers in the
// instruction-set files).
constexpr uint64_t Crc32cPower(uint32_t n) {
  uint32_t value = 0x80000000u;
  for (uint32_t i = 0; i < n; ++i) {
    value = (value >> 1) ^ ((value & 1u) != 0 ? kCrc32cPolynomial : 0u);
  }
  return uint64_t{value} << 1;
}

// Both functions take and return the running, inverted register: ~seed in, ~crc out.
uint32_t Crc32cPclmul(uint32_t state, const std::byte* data, size_t bytes);   // SSE4.2, PCLMUL
uint32_t Crc32cVpclmul(uint32_t state, const std::byte* data, size_t bytes);  // AVX-512, VPCLMULQDQ

}  // namespace pqcached::kernels::internal

#endif  // PQCACHED_KERNELS_BASE_CRC32C_INTERNAL_H_

// CRC32C (Castagnoli, reflected, polynomial 0x1EDC6F41), the checksum of all stored and transferred
// data.
//
// Pure functions; thread-safe.
#ifndef PQCACHED_KERNELS_BASE_CRC32C_H_
#define PQCACHED_KERNELS_BASE_CRC32C_H_

#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/base/exec.h"

namespace pqcached::kernels {

// Returns the CRC32C of `data` appended to bytes whose CRC32C is `seed` (0: no bytes before), so
// that
//   Crc32c(exec, b, Crc32c(exec, a)) == Crc32c(exec, a followed by b).
// All instruction sets give the same value. The CRC32C of "123456789" is 0xe3069283.
uint32_t Crc32c(const Exec& exec, std::span<const std::byte> data, uint32_t seed = 0);

}  // namespace pqcached::kernels

#endif  // PQCACHED_KERNELS_BASE_CRC32C_H_

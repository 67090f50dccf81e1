// TakeQuota, for scans that write the positions of masks of 64 tokens on machines with BMI2.
//
// Everything is local to the including file.
#ifndef PQCACHED_KERNELS_BASE_SIMD_TAKE_QUOTA_BMI2_H_
#define PQCACHED_KERNELS_BASE_SIMD_TAKE_QUOTA_BMI2_H_

#include <immintrin.h>

#include <cstdint>

namespace pqcached::kernels {
namespace {

// Returns the lowest bits of the mask, at most `quota` of them, and subtracts their number from the
// quota.
inline uint64_t TakeQuota(uint64_t mask, uint32_t& quota) {
  const auto count = static_cast<uint32_t>(__builtin_popcountll(mask));
  if (count <= quota) {
    quota -= count;
    return mask;
  }
  const uint64_t taken = _pdep_u64((1ull << quota) - 1, mask);
  quota = 0;
  return taken;
}

}  // namespace
}  // namespace pqcached::kernels

#endif  // PQCACHED_KERNELS_BASE_SIMD_TAKE_QUOTA_BMI2_H_

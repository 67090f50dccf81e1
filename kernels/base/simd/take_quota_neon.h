// TakeQuota (take_quota_bmi2.h) without an instruction that deposits bits: one turn of the loop for
// each token of the quota, in the one call of a scan that uses the quota up.
//
// Everything is local to the including file.
#ifndef PQCACHED_KERNELS_BASE_SIMD_TAKE_QUOTA_NEON_H_
#define PQCACHED_KERNELS_BASE_SIMD_TAKE_QUOTA_NEON_H_

#include <cstdint>

namespace pqcached::kernels {
namespace {

inline uint64_t TakeQuota(uint64_t mask, uint32_t& quota) {
  const auto count = static_cast<uint32_t>(__builtin_popcountll(mask));
  if (count <= quota) {
    quota -= count;
    return mask;
  }
  uint64_t rest = mask;
  for (; quota > 0; --quota) rest &= rest - 1;
  return mask & ~rest;
}

}  // namespace
}  // namespace pqcached::kernels

#endif  // PQCACHED_KERNELS_BASE_SIMD_TAKE_QUOTA_NEON_H_

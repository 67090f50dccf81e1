// The part of CUDA's cuda_fp16.h that the kernels use, over kernels/base/dtype.h.
#ifndef PQCACHED_TESTS_GPU_EMULATION_CUDA_FP16_H_
#define PQCACHED_TESTS_GPU_EMULATION_CUDA_FP16_H_

#include "kernels/base/dtype.h"

// NOLINTBEGIN: names are CUDA's.
struct __half {
  uint16_t bits;
};
inline __half __ushort_as_half(unsigned short bits) { return {bits}; }
inline unsigned short __half_as_ushort(__half value) { return value.bits; }
inline float __half2float(__half value) { return pqcached::kernels::F16ToF32(value.bits); }
inline __half __float2half_rn(float value) { return {pqcached::kernels::F32ToF16(value)}; }
// NOLINTEND

#endif  // PQCACHED_TESTS_GPU_EMULATION_CUDA_FP16_H_

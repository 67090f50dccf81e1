// Element access for rows and tensors on the device: the conversions of kernels/base/dtype.h.
#ifndef PQCACHED_KERNELS_CUDA_ELEMENTS_CUH_
#define PQCACHED_KERNELS_CUDA_ELEMENTS_CUH_

#include <cuda_fp16.h>

#include "kernels/cuda/launch.cuh"
#include "kernels/base/dtype.h"

namespace pqcached::kernels::cuda {

// DTypeBytes for host and device code.
__host__ __device__ constexpr uint32_t ElementBytes(DType dtype) {
  return dtype == DType::kF32 ? 4 : 2;
}

__device__ inline float HalfToFloat(uint32_t bits) {
  return __half2float(__ushort_as_half(static_cast<unsigned short>(bits)));
}
__device__ inline float Bf16ToFloat(uint32_t bits) { return __uint_as_float(bits << 16); }

// Rounds to nearest, ties to even. NaN stays NaN.
__device__ inline uint16_t FloatToBf16(float value) {
  const uint32_t bits = __float_as_uint(value);
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return static_cast<uint16_t>(bits >> 16 | 0x40u);
  return static_cast<uint16_t>((bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16);
}
__device__ inline uint16_t FloatToHalf(float value) {
  return __half_as_ushort(__float2half_rn(value));
}

// Loads an element as a float. REQUIRES: `data` is aligned for its type.
__device__ inline float LoadFloat(DType dtype, const std::byte* data, size_t index) {
  if (dtype == DType::kF32) return reinterpret_cast<const float*>(data)[index];
  const uint32_t bits = reinterpret_cast<const uint16_t*>(data)[index];
  return dtype == DType::kF16 ? HalfToFloat(bits) : Bf16ToFloat(bits);
}
__device__ inline void StoreFloat(DType dtype, std::byte* data, size_t index, float value) {
  if (dtype == DType::kF32) {
    reinterpret_cast<float*>(data)[index] = value;
  } else {
    reinterpret_cast<uint16_t*>(data)[index] =
        dtype == DType::kF16 ? FloatToHalf(value) : FloatToBf16(value);
  }
}

// The elements in 16 bytes: 8 elements of two bytes, or 4 of four.
template <DType kDType>
struct Vector16 {
  static constexpr uint32_t kCount = 16 / ElementBytes(kDType);
  float values[kCount];

  __device__ explicit Vector16(uint4 words) {
    const uint32_t parts[4] = {words.x, words.y, words.z, words.w};
    PQC_UNROLL
    for (uint32_t i = 0; i < kCount; ++i) {
      if constexpr (kDType == DType::kF32) {
        values[i] = __uint_as_float(parts[i]);
      } else {
        const uint32_t bits = parts[i / 2] >> i % 2 * 16 & 0xFFFFu;
        values[i] = kDType == DType::kF16 ? HalfToFloat(bits) : Bf16ToFloat(bits);
      }
    }
  }
};

}  // namespace pqcached::kernels::cuda

#endif  // PQCACHED_KERNELS_CUDA_ELEMENTS_CUH_

// Element types of rows and tensors, and their scalar conversions.
//
// All narrowing rounds to nearest, ties to even; a finite value beyond the range becomes infinity.
// NaN stays NaN. The vector forms inside the kernels give the same bits, NaN payloads excepted.
//
// Pure functions; thread-safe.
#ifndef PQCACHED_KERNELS_BASE_DTYPE_H_
#define PQCACHED_KERNELS_BASE_DTYPE_H_

#include <cstddef>
#include <cstdint>

namespace pqcached::kernels {

enum class DType : uint8_t {
  kF16 = 1,   // IEEE 754 binary16
  kBf16 = 2,  // upper half of binary32
  kF32 = 3,   // IEEE 754 binary32
};

// Checks that `value` is one of the enumerators, for values from untrusted input.
bool IsDType(uint8_t value);

// Returns 2, 2 or 4. REQUIRES: IsDType.
size_t DTypeBytes(DType dtype);

// Returns "f16", "bf16" or "f32".
const char* DTypeName(DType dtype);

float F16ToF32(uint16_t bits);
uint16_t F32ToF16(float value);
float Bf16ToF32(uint16_t bits);
uint16_t F32ToBf16(float value);

// Loads or stores element `index` of an array of `dtype` that begins at `data`, at any alignment.
float LoadElement(DType dtype, const std::byte* data, size_t index);
void StoreElement(DType dtype, std::byte* data, size_t index, float value);

// Converts `count` elements; the arrays may have any alignment and must not overlap.
void ConvertElements(DType from, const std::byte* source, DType to, std::byte* target,
                     size_t count);

}  // namespace pqcached::kernels

#endif  // PQCACHED_KERNELS_BASE_DTYPE_H_

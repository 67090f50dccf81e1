// What int8_row.cc, ingest.cc and the instruction-set files share. Private to them.
#ifndef PQCACHED_KERNELS_INT8_ROW_INTERNAL_H_
#define PQCACHED_KERNELS_INT8_ROW_INTERNAL_H_

#include <cstddef>
#include <cstdint>

#include "kernels/dtype.h"

namespace pqcached::kernels::internal {

// The largest element is 127 times the scale.
inline constexpr float kInt8Most = 127.0f;
// Below it a vector counts as zero, so that the reciprocal of the scale stays finite.
inline constexpr float kInt8Least = 0x1p-100f;

// Keys or values of some rows, between int8 and another type. Dims are multiples of 8.
struct Int8Call {
  DType dtype;  // of the other side
  uint32_t dim;
  uint32_t row_count;
  std::byte* part;          // the first row's int8 elements
  size_t scale_offset;      // from there to the scale
  size_t row_stride_bytes;  // of the int8 rows
  std::byte* other;
  size_t other_stride_bytes;
};

// Reads `other`, writes the parts and their scales.
void QuantizeAvx2(const Int8Call& call);
void QuantizeAvx512(const Int8Call& call);

// Reads the parts and their scales, writes `other`.
void DequantizeAvx2(const Int8Call& call);
void DequantizeAvx512(const Int8Call& call);

}  // namespace pqcached::kernels::internal

#endif  // PQCACHED_KERNELS_INT8_ROW_INTERNAL_H_

// Declarations shared by int8_row.cc, ingest.cc and the instruction-set files, and private to them.
#ifndef PQCACHED_KERNELS_ROWS_INT8_ROW_INTERNAL_H_
#define PQCACHED_KERNELS_ROWS_INT8_ROW_INTERNAL_H_

#include <cstddef>
#include <cstdint>

#include "kernels/base/dtype.h"

namespace pqcached::kernels::internal {

// The largest element is 127 times the scale.
inline constexpr float kInt8Max = 127.0f;
// Vectors below this magnitude count as zero, so that the reciprocal of the scale stays finite.
inline constexpr float kInt8MinMagnitude = 0x1p-100f;

// Arguments for converting keys or values of some rows between int8 and another dtype. Dims are
// multiples of 8.
struct Int8Call {
  DType dtype;  // dtype of `other`
  uint32_t dim;
  uint32_t row_count;
  std::byte* part;          // the first row's int8 elements
  size_t scale_offset;      // bytes from `part` to the scale
  size_t row_stride_bytes;  // stride of the int8 rows
  std::byte* other;
  size_t other_stride_bytes;
};

// Read `other`, write the parts and their scales.
void QuantizeAvx2(const Int8Call& call);
void QuantizeAvx512(const Int8Call& call);

// Read the parts and their scales, write `other`.
void DequantizeAvx2(const Int8Call& call);
void DequantizeAvx512(const Int8Call& call);

}  // namespace pqcached::kernels::internal

#endif  // PQCACHED_KERNELS_ROWS_INT8_ROW_INTERNAL_H_

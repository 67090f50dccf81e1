// Int8 rows: half the bytes of fp16 rows, for caches in which memory or bandwidth matters more than
// precision.
//
//   [key_dim x int8 | value_dim x int8 | fp32 scale of the key | fp32 scale of the value]
//
// The layout has no padding and any alignment; rows that contain only keys end with the scale of
// the key. An element is its int8 times the scale. IngestInt8Rows (kernels/rows/ingest.h) writes
// such rows; attention and exact scores read them after DequantizeRows.
//
// Stateless; thread-safe as long as targets are not shared.
#ifndef PQCACHED_KERNELS_ROWS_INT8_ROW_H_
#define PQCACHED_KERNELS_ROWS_INT8_ROW_H_

#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/base/dtype.h"
#include "kernels/base/exec.h"

namespace pqcached::kernels {

// Returns the size of a row in bytes. value_dim 0: the row contains only the key.
constexpr size_t Int8RowBytes(uint32_t key_dim, uint32_t value_dim) {
  return size_t{key_dim} + value_dim + (value_dim > 0 ? 2 : 1) * sizeof(float);
}

// Sets to[i] = from[i] / scale, rounded to the nearest (ties to even), and returns the scale, which
// maps the largest magnitude to 127:
//   |from[i] - to[i] * scale| <= 0.5001 * scale, scale = max |from| / 127.
// Vectors whose elements are all below 2^-100 become zeros with scale 0. This function is the
// specification; the vector variants give the same bits. REQUIRES: finite elements, from.size() ==
// to.size().
float QuantizeInt8(std::span<const float> from, std::span<int8_t> to);

struct DequantizeArgs {
  uint32_t row_count = 0;
  uint32_t key_dim = 0;             // multiple of 8
  uint32_t value_dim = 0;           // likewise, or 0
  std::span<const std::byte> rows;  // int8 rows (the last one may end with its scales)
  size_t row_stride_bytes = 0;      // >= Int8RowBytes(key_dim, value_dim)
  DType target_dtype = DType::kF16;
  std::span<std::byte> target;  // rows [key | value] of target_dtype, any alignment
  size_t target_stride_bytes = 0;
};

// Writes element * scale, a product in fp32 that is rounded to target_dtype. All instruction sets
// give the same bits. Source and target must not overlap.
void DequantizeRows(const Exec& exec, const DequantizeArgs& args);

}  // namespace pqcached::kernels

#endif  // PQCACHED_KERNELS_ROWS_INT8_ROW_H_

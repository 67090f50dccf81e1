// RotateRows multiplies keys or queries by a square map, as query-weighted product quantization
// needs (key_map.h).
#ifndef PQCACHED_KERNELS_TRAIN_ROTATE_H_
#define PQCACHED_KERNELS_TRAIN_ROTATE_H_

#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/base/dtype.h"
#include "kernels/base/exec.h"

namespace pqcached::kernels {

struct RotateArgs {
  DType dtype = DType::kF32;        // dtype of the rows
  const std::byte* rows = nullptr;  // first number of the first row, any alignment
  size_t row_stride = 0;            // bytes
  uint32_t row_count = 0;
  uint32_t dim = 0;            // of a row and of the map; at least 32
  std::span<const float> map;  // [dim, dim]: input, output
  uint32_t first_output = 0;  // the outputs [first_output, first_output + output_count) are written
  uint32_t output_count = 0;
  float* outputs = nullptr;      // [row_count, output_count]
  std::span<std::byte> scratch;  // RotateScratchBytes, 64-byte aligned
};

size_t RotateScratchBytes(uint32_t dim);

// Writes outputs[r, o] = sum over i of row r's number i times map[i, first_output + o].
//
// Instruction sets round differently: the error is at most dim * 2^-22 of the sum of the products'
// magnitudes.
void RotateRows(const Exec& exec, const RotateArgs& args);

}  // namespace pqcached::kernels

#endif  // PQCACHED_KERNELS_TRAIN_ROTATE_H_

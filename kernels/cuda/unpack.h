// UnpackRows converts rows `[key | value]` to K and V in the layout of the engine, in device
// memory. It reads the rows where they are, in page-locked memory of the host.
//
// This is the opposite of PackRows (pack.h), and the device variant of kernels/rows/unpack.h.
#ifndef PQCACHED_KERNELS_CUDA_UNPACK_H_
#define PQCACHED_KERNELS_CUDA_UNPACK_H_

#include <cstddef>
#include <cstdint>

#include "kernels/base/dtype.h"
#include "kernels/cuda/status.h"

namespace pqcached::kernels::cuda {

inline constexpr uint32_t kMaxUnpackHeads = 256;

// Where K or V is written: element (t, h, i) is at data + token(t) + h * head_stride + i *
// dim_stride, in elements. No two elements have the same place.
struct UnpackTensor {
  std::byte* data = nullptr;  // aligned for its type
  DType dtype = DType::kF16;
  // Null: token(t) = t * token_stride. Otherwise, in device memory, token_offsets[t].
  const int64_t* token_offsets = nullptr;
  int64_t token_stride = 0;
  int64_t head_stride = 0;
  int64_t dim_stride = 1;
};

struct UnpackRowsArgs {
  uint32_t token_count = 0;
  uint32_t head_count = 0;  // kv heads, at most kMaxUnpackHeads
  uint32_t key_dim = 0;     // a multiple of 8, at most 256
  uint32_t value_dim = 0;   // likewise
  DType row_dtype = DType::kF16;
  size_t row_stride_bytes = 0;  // >= (key_dim + value_dim) * DTypeBytes(row_dtype), multiple of 16
  UnpackTensor key;
  UnpackTensor value;
  // The rows of each head from token 0 on, in memory that the device reads; aligned to 16 bytes.
  const std::byte* rows[kMaxUnpackHeads] = {};
};

// Writes the rows of all tokens and heads. Narrowing rounds as kernels/base/dtype.h does.
//
// Errors: those of the launch; cudaErrorInvalidValue when a number is out of range.
KernelStatus UnpackRows(const UnpackRowsArgs& args, Stream stream);

}  // namespace pqcached::kernels::cuda

#endif  // PQCACHED_KERNELS_CUDA_UNPACK_H_

// The small kernels that a model needs beside ours and matrix products; and an empty one.
#ifndef PQCACHED_TESTS_GPU_BENCH_MODEL_KERNELS_H_
#define PQCACHED_TESTS_GPU_BENCH_MODEL_KERNELS_H_

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/status.h"

namespace pqcached::bench {

using kernels::cuda::KernelStatus;
using kernels::cuda::Stream;

// fp16 numbers are handed around as bytes.
KernelStatus GiveEmpty(Stream stream);

// out[row] = x[row] / sqrt(mean of x[row]^2 + 1e-5); [row_count, dim] fp16.
KernelStatus RmsNorm(const std::byte* x, uint32_t row_count, uint32_t dim, std::byte* out,
                     Stream stream);

struct RotateArgs {
  const std::byte* qkv = nullptr;  // [batch, (query_heads + 2 kv_heads) * dim] fp16
  uint32_t batch = 0;
  uint32_t query_heads = 0;
  uint32_t kv_heads = 0;
  uint32_t dim = 0;  // even
  uint32_t position = 0;
  float* queries = nullptr;   // [batch, query_heads, dim], overwritten
  std::byte* rows = nullptr;  // [batch, kv_heads, 2 dim] fp16: [key | value] of the new token
};
// Rotary embedding of queries and keys.
KernelStatus Rotate(const RotateArgs& args, Stream stream);

// out[i] = fp16 of x[i].
KernelStatus ToHalf(const float* x, uint32_t count, std::byte* out, Stream stream);

// out[row, i] = silu(x[row, i]) * x[row, dim + i]; x [row_count, 2 dim], out [row_count, dim] fp16.
KernelStatus SiluMultiply(const std::byte* x, uint32_t row_count, uint32_t dim, std::byte* out,
                          Stream stream);

}  // namespace pqcached::bench

#endif  // PQCACHED_TESTS_GPU_BENCH_MODEL_KERNELS_H_

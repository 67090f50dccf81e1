// PackRows: K and V as engines hold them -> rows `[key | value]`, on the device: the prefill offload into
// page-locked staging, from where a Commit takes them.
//
// The device twin of kernels/ingest.h without its checks: what is not finite, and the checksum, are looked
// for when the sidecar copies the rows out of staging.
#ifndef PQCACHED_KERNELS_CUDA_PACK_H_
#define PQCACHED_KERNELS_CUDA_PACK_H_

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/status.h"
#include "kernels/dtype.h"

namespace pqcached::kernels::cuda {

// [tokens, heads, dim], or with a block table [blocks, tokens of a block, heads, dim]: element (t, h, i)
// is at data + block(t) * block_stride + (t within its block) * token_stride + h * head_stride + i, in
// elements; dimensions are contiguous.
struct PackTensor {
  const std::byte* data = nullptr;  // aligned for its type
  DType dtype = DType::kF16;
  int64_t block_stride = 0;  // read with a block table
  int64_t token_stride = 0;
  int64_t head_stride = 0;
};

struct PackRowsArgs {
  uint32_t token_count = 0;
  uint32_t first_token = 0;  // of the tensors, or of the sequence that the block table describes
  uint32_t head_count = 0;   // kv heads, at most 65535
  uint32_t key_dim = 0;      // multiple of 8, at most 256
  uint32_t value_dim = 0;    // likewise; 0: rows hold keys alone
  PackTensor key;
  PackTensor value;
  // Null: no blocks. Else block_table[t / block_tokens] is the block of token t, in device memory.
  const int32_t* block_table = nullptr;
  uint32_t block_tokens = 0;
  DType row_dtype = DType::kF16;
  std::byte* rows = nullptr;     // of head 0; aligned for row_dtype
  size_t head_stride_bytes = 0;  // from the rows of one head to those of the next
  size_t row_stride_bytes = 0;   // >= (key_dim + value_dim) * DTypeBytes(row_dtype)
};

// Writes the row of token first_token + t and head h to rows + h * head_stride_bytes + t *
// row_stride_bytes. Narrowing rounds as kernels/dtype.h does.
//
// Errors: those of the launch; cudaErrorInvalidValue when a number is out of range.
KernelStatus PackRows(const PackRowsArgs& args, Stream stream);

}  // namespace pqcached::kernels::cuda

#endif  // PQCACHED_KERNELS_CUDA_PACK_H_

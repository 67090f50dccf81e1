// PackRows converts K and V from the layout of the engine to rows `[key | value]` on the device.
// The prefill offload uses it to fill page-locked staging, which a Commit reads.
//
// This is the device variant of kernels/rows/ingest.h without its checks: the sidecar checks for
// non-finite values and computes the checksum when it copies the rows out of staging. PackStepRows
// packs rows that are attended to before the sidecar sees them, and therefore checks.
#ifndef PQCACHED_KERNELS_CUDA_PACK_H_
#define PQCACHED_KERNELS_CUDA_PACK_H_

#include <cstddef>
#include <cstdint>

#include "kernels/base/dtype.h"
#include "kernels/cuda/status.h"
#include "kernels/cuda/step/refused.h"
#include "kernels/cuda/step/seats.h"

namespace pqcached::kernels::cuda {

// A tensor [tokens, heads, dim], or with a block table [blocks, tokens of a block, heads, dim].
// Element (t, h, i) is at data + block(t) * block_stride + (t within its block) * token_stride + h
// * head_stride + i, in elements; dimensions are contiguous.
struct PackTensor {
  const std::byte* data = nullptr;  // aligned for its type
  DType dtype = DType::kF16;
  int64_t block_stride = 0;  // used with a block table only
  int64_t token_stride = 0;
  int64_t head_stride = 0;
};

struct PackRowsArgs {
  uint32_t token_count = 0;
  uint32_t first_token = 0;  // index in the tensors, or in the sequence that the block table maps
  uint32_t head_count = 0;   // kv heads, at most 65535
  uint32_t key_dim = 0;      // multiple of 8, at most 256
  uint32_t value_dim = 0;    // likewise; 0: rows contain only keys
  PackTensor key;
  PackTensor value;
  // Null: no blocks. Otherwise block_table[t / block_tokens] is the block of token t; in device
  // memory.
  const int32_t* block_table = nullptr;
  uint32_t block_tokens = 0;
  DType row_dtype = DType::kF16;
  std::byte* rows = nullptr;     // rows of head 0; aligned for row_dtype
  size_t head_stride_bytes = 0;  // between the rows of consecutive heads
  size_t row_stride_bytes = 0;   // >= (key_dim + value_dim) * DTypeBytes(row_dtype)
};

// Writes the row of token first_token + t and head h to rows + h * head_stride_bytes + t *
// row_stride_bytes. Narrowing rounds as kernels/base/dtype.h does.
//
// Errors: those of the launch; cudaErrorInvalidValue when a number is out of range.
KernelStatus PackRows(const PackRowsArgs& args, Stream stream);

struct PackStepRowsArgs {
  SeatShape shape;
  const SeatItem* seats = nullptr;  // [seat_capacity], in device memory
  // The tensors have the query tokens of all items in order. Without a block table; token_count,
  // first_token and head_count have no effect.
  PackRowsArgs rows;
  uint32_t* packed = nullptr;     // page-locked memory: one word, which becomes 1
  RefusedElement bad_key = {};    // the query token of a NaN or infinity, also after the rounding
  RefusedElement bad_value = {};  // likewise
};

// Packs the rows of a step's query tokens as PackRows does, for the items that the step has: a
// captured launch packs those of the step in which it is replayed. Rows of other tokens stay
// unchanged.
//
// Errors: as above.
KernelStatus PackStepRows(const PackStepRowsArgs& args, Stream stream);

}  // namespace pqcached::kernels::cuda

#endif  // PQCACHED_KERNELS_CUDA_PACK_H_

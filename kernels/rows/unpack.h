// Unpack copies rows `[key | value]` (KV entries) of all kv heads of a layer to strided K and V
// tensors: the inverse of IngestHeads (ingest.h).
//
// Stateless; thread-safe as long as targets are not shared.
#ifndef PQCACHED_KERNELS_ROWS_UNPACK_H_
#define PQCACHED_KERNELS_ROWS_UNPACK_H_

#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/base/dtype.h"
#include "kernels/base/exec.h"

namespace pqcached::kernels {

// A tensor [tokens, heads, dim] that is written. Different elements have different places.
struct UnpackTarget {
  std::byte* data = nullptr;  // element [0, 0, 0]; any alignment
  DType dtype = DType::kF16;
  ptrdiff_t token_stride_bytes = 0;  // any sign
  ptrdiff_t head_stride_bytes = 0;
  // DTypeBytes(dtype) is the fast case. With a token stride of DTypeBytes(dtype), K and V are
  // transposed, as some engines store them within a block.
  ptrdiff_t element_stride_bytes = 0;
};

struct UnpackArgs {
  uint32_t token_count = 0;
  uint32_t key_dim = 0;    // a multiple of 8, at most 256
  uint32_t value_dim = 0;  // likewise
  DType row_dtype = DType::kF16;
  size_t row_stride_bytes = 0;             // >= (key_dim + value_dim) * DTypeBytes(row_dtype)
  std::span<const std::byte* const> rows;  // [heads]: the first row of each head; any alignment
  UnpackTarget key;
  UnpackTarget value;
  // Bypasses the caches where parts of rows are whole cache lines of the target: for results that
  // are larger than the caches.
  bool stream = false;
};

// Writes the keys and values of all tokens and heads, converted as dtype.h says. Rows and targets
// must not overlap. Stores are fenced before return.
void UnpackHeads(const Exec& exec, const UnpackArgs& args);

}  // namespace pqcached::kernels

#endif  // PQCACHED_KERNELS_ROWS_UNPACK_H_

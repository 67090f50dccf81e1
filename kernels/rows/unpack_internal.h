// Declarations shared by unpack.cc and its instruction-set files, and private to them.
#ifndef PQCACHED_KERNELS_ROWS_UNPACK_INTERNAL_H_
#define PQCACHED_KERNELS_ROWS_UNPACK_INTERNAL_H_

#include <cstddef>
#include <cstdint>

#include "kernels/base/dtype.h"

namespace pqcached::kernels::internal {

// Keys or values of all heads of a layer, whose elements are contiguous in the target.
struct UnpackPart {
  uint32_t dim;  // 0: the part is not copied
  DType to;
  size_t begin_bytes;  // offset in a row
  std::byte* target;
  ptrdiff_t token_stride_bytes;
  ptrdiff_t head_stride_bytes;
};

struct UnpackCall {
  UnpackPart key;
  UnpackPart value;
  DType from;
  uint32_t token_count;
  const std::byte* const* rows;  // of each head
  uint32_t head_count;
  size_t row_stride_bytes;
  bool stream;
};

void UnpackAvx2(const UnpackCall& call);
void UnpackAvx512(const UnpackCall& call);

}  // namespace pqcached::kernels::internal

#endif  // PQCACHED_KERNELS_ROWS_UNPACK_INTERNAL_H_

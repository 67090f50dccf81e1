// Declarations shared by gather.cc and its instruction-set files, and private to them.
#ifndef PQCACHED_KERNELS_ROWS_GATHER_INTERNAL_H_
#define PQCACHED_KERNELS_ROWS_GATHER_INTERNAL_H_

#include <cstddef>
#include <cstdint>

#include "kernels/base/row_span.h"

namespace pqcached::kernels::internal {

// GatherArgs in plain pointers, because instruction-set files use no standard templates.
struct GatherCall {
  size_t row_stride_bytes;
  size_t part_begin_bytes;
  size_t part_bytes;  // > 0
  const RowSpan* spans;
  const uint32_t* positions;
  size_t position_count;
  std::byte* target;
  size_t target_stride_bytes;
};

void GatherAvx2(const GatherCall& call);
void GatherAvx512(const GatherCall& call);

}  // namespace pqcached::kernels::internal

#endif  // PQCACHED_KERNELS_ROWS_GATHER_INTERNAL_H_

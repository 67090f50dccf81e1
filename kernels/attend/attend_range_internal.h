// Declarations shared by attend_range.cc and its instruction-set files, and private to them.
#ifndef PQCACHED_KERNELS_ATTEND_ATTEND_RANGE_INTERNAL_H_
#define PQCACHED_KERNELS_ATTEND_ATTEND_RANGE_INTERNAL_H_

#include <cstddef>
#include <cstdint>

#include "kernels/base/dtype.h"
#include "kernels/base/row_span.h"

namespace pqcached::kernels::internal {

// Queries that are computed together, at most (AVX-512: three vectors of 16).
inline constexpr uint32_t kMaxLaneQueries = 48;
// Rows per block of the online softmax, in fp32; twice as many in bf16. A block of fp32 keys and
// values of 128 dims takes 64 KiB, a part of L2.
inline constexpr uint32_t kRangeBlockRows = 64;
inline constexpr uint32_t kMaxRangeBlockRows = 2 * kRangeBlockRows;

// AttendRangeArgs in plain pointers, because instruction-set files use no standard templates.
struct RangeCall {
  DType dtype;
  uint32_t key_dim;
  uint32_t value_dim;
  size_t row_stride_bytes;
  uint32_t group_size;
  uint32_t head_count;  // token_count * group_size
  float scale;
  float softcap;
  uint32_t query_position;
  const float* queries;  // [head_count, key_dim]
  const RowSpan* spans;
  size_t span_count;
  float* output;       // [head_count, value_dim]
  float* lse;          // [head_count]
  std::byte* scratch;  // aligned to 64
};

void AttendRangePortable(const RangeCall& call);
void AttendRangeAvx2(const RangeCall& call);
void AttendRangeAvx512(const RangeCall& call);
void AttendRangeAvx512Bf16(const RangeCall& call);  // REQUIRES: bf16 rows

}  // namespace pqcached::kernels::internal

#endif  // PQCACHED_KERNELS_ATTEND_ATTEND_RANGE_INTERNAL_H_

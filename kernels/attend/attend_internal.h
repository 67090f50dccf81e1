// Declarations shared by attend.cc and its instruction-set files, and private to them.
#ifndef PQCACHED_KERNELS_ATTEND_ATTEND_INTERNAL_H_
#define PQCACHED_KERNELS_ATTEND_ATTEND_INTERNAL_H_

#include <cstddef>
#include <cstdint>

#include "kernels/base/dtype.h"
#include "kernels/base/row_span.h"

namespace pqcached::kernels::internal {

// Number of heads (query positions times query heads) that one pass over the rows serves; more
// heads take several passes.
inline constexpr uint32_t kHeadsPerPass = 64;

// Rows per block of the online softmax: a block of 512-byte rows takes half of a 32 KiB L1 cache.
inline constexpr uint32_t kBlockRows = 32;

// State of one head between blocks, kept in scratch.
struct AttendHead {
  float largest;     // largest logit so far
  float weight_sum;  // sum of exp(logit - largest)
  float norm_sum;    // sum of the weights as they were applied to the values
  float rescale;     // factor for the earlier sums before the current block is added
};
inline constexpr uint32_t kHeadStateFloats = sizeof(AttendHead) / sizeof(float);

// AttendArgs in plain pointers, because instruction-set files use no standard templates.
struct AttendCall {
  DType dtype;
  uint32_t key_dim;
  uint32_t value_dim;
  size_t row_stride_bytes;
  ptrdiff_t value_offset_bytes;  // from a key to its value
  uint32_t head_count;           // heads in this pass: 1..kHeadsPerPass
  float scale;
  float softcap;
  const float* queries;  // [head_count, key_dim]
  const float* logits;   // [head_count, position_count] in place of queries; null: none
  const RowSpan* spans;
  size_t span_count;
  const uint32_t* positions;
  size_t position_count;
  bool all_rows;       // true: use all rows of all spans, ignore positions
  float* output;       // [head_count, value_dim]
  float* lse;          // [head_count]
  std::byte* scratch;  // aligned to 64
};

void AttendPortable(const AttendCall& call);
void AttendAvx2(const AttendCall& call);
void AttendAvx512(const AttendCall& call);
void AttendAvx512Bf16(const AttendCall& call);  // REQUIRES: bf16 rows

}  // namespace pqcached::kernels::internal

#endif  // PQCACHED_KERNELS_ATTEND_ATTEND_INTERNAL_H_

// Declarations shared by exact_score.cc and its instruction-set files, and private to them.
#ifndef PQCACHED_KERNELS_SELECT_EXACT_EXACT_SCORE_INTERNAL_H_
#define PQCACHED_KERNELS_SELECT_EXACT_EXACT_SCORE_INTERNAL_H_

#include <cstddef>
#include <cstdint>

#include "kernels/base/dtype.h"
#include "kernels/base/row_span.h"

namespace pqcached::kernels::internal {

// ExactScoreArgs in plain pointers, because instruction-set files use no standard templates.
struct ExactScoreCall {
  DType dtype;
  uint32_t key_dim;
  size_t row_stride_bytes;
  uint32_t group_size;
  uint32_t token_count;
  float scale;
  const float* queries;
  const std::byte* rows;      // null: the rows of `positions`
  const RowSpan* spans;       // as in ExactScoreArgs
  const uint32_t* positions;  // [token_count]
  size_t score_stride;
  float* scores;
  float* scratch;  // [group_size, PaddedDim(key_dim)], aligned to 64
};

void ExactScoresPortable(const ExactScoreCall& call);
void ExactScoresAvx2(const ExactScoreCall& call);
void ExactScoresAvx512(const ExactScoreCall& call);
void ExactScoresAvx512Bf16(const ExactScoreCall& call);  // REQUIRES: bf16 rows

}  // namespace pqcached::kernels::internal

#endif  // PQCACHED_KERNELS_SELECT_EXACT_EXACT_SCORE_INTERNAL_H_

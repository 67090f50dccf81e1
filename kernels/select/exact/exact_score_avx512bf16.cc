#include "kernels/base/simd/dot_avx512bf16.h"
// Vec must be included first: the next headers are written in terms of it.
#include "kernels/select/exact/exact_score_simd.h"

namespace pqcached::kernels::internal {

void ExactScoresAvx512Bf16(const ExactScoreCall& call) {
  ExactScoresWith<Bf16Dots>(call, call.key_dim * 2);
}

}  // namespace pqcached::kernels::internal

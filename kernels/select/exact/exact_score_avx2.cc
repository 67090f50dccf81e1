#include "kernels/base/simd/simd_avx2.h"
// Vec must be included first: the next headers are written in terms of it.
#include "kernels/select/exact/exact_score_simd.h"

namespace pqcached::kernels::internal {

void ExactScoresAvx2(const ExactScoreCall& call) { ExactScoresByType(call); }

}  // namespace pqcached::kernels::internal

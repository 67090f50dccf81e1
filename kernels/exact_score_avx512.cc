#include "kernels/simd_avx512.h"
// Vec comes first: what follows is written in terms of it.
#include "kernels/exact_score_simd.h"

namespace pqcached::kernels::internal {

void ExactScoresAvx512(const ExactScoreCall& call) { ExactScoresByType(call); }

}  // namespace pqcached::kernels::internal

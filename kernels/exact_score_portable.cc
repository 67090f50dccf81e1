#include "kernels/simd_portable.h"
// Vec comes first: what follows is written in terms of it.
#include "kernels/exact_score_simd.h"

namespace pqcached::kernels::internal {

void ExactScoresPortable(const ExactScoreCall& call) { ExactScoresByType(call); }

}  // namespace pqcached::kernels::internal

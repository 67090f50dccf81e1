#include "kernels/base/simd/simd_portable.h"
// Vec must be included first: the next headers are written in terms of it.
#include "kernels/select/exact/exact_score_simd.h"

namespace pqcached::kernels::internal {

void ExactScoresPortable(const ExactScoreCall& call) { ExactScoresByType(call); }

}  // namespace pqcached::kernels::internal

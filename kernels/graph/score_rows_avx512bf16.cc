#include "kernels/base/simd/dot_avx512bf16.h"
// Vec must be included first: the next headers are written in terms of it.
#include "kernels/graph/score_rows_simd.h"

namespace pqcached::kernels::internal {

RowScorer RowScorerAvx512Bf16() { return RowScorerWith<Bf16Dots>(); }

}  // namespace pqcached::kernels::internal

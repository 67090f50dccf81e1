#include "kernels/base/simd/simd_portable.h"
// Vec must be included first: the next headers are written in terms of it.
#include "kernels/graph/score_rows_simd.h"

namespace pqcached::kernels::internal {

RowScorer RowScorerPortable(DType dtype) { return RowScorerByType(dtype); }

}  // namespace pqcached::kernels::internal

#include "kernels/base/simd/simd_avx512.h"
// Vec must be included first: the next headers are written in terms of it.
#include "kernels/rows/gather_simd.h"

namespace pqcached::kernels::internal {

void GatherAvx512(const GatherCall& call) { GatherBatches(call); }

}  // namespace pqcached::kernels::internal

#include "kernels/simd_avx2.h"
// Vec comes first: what follows is written in terms of it.
#include "kernels/gather_simd.h"

namespace pqcached::kernels::internal {

void GatherAvx2(const GatherCall& call) { GatherByStores(call); }

}  // namespace pqcached::kernels::internal

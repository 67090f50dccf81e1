#include "kernels/simd_avx512.h"
// Vec comes first: what follows is written in terms of it.
#include "kernels/gather_simd.h"

namespace pqcached::kernels::internal {

void GatherAvx512(const GatherCall& call) { GatherByStores(call); }

}  // namespace pqcached::kernels::internal

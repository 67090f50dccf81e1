#include "kernels/base/simd/simd_avx2.h"
// Vec must be included first: the next headers are written in terms of it.
#include "kernels/rows/ingest_heads_simd.h"
#include "kernels/rows/ingest_simd.h"

namespace pqcached::kernels::internal {

bool StagePartAvx2(const StageCall& call) { return StageByTypes(call); }

uint32_t CopyHeadsAvx2(const HeadsCall& call) { return CopyHeads(call); }

}  // namespace pqcached::kernels::internal

#include "kernels/simd_avx2.h"
// Vec comes first: what follows is written in terms of it.
#include "kernels/ingest_simd.h"

namespace pqcached::kernels::internal {

bool StagePartAvx2(const StageCall& call) { return StageByTypes(call); }

void StreamRowsAvx2(const StreamCall& call) { StreamStagedRows(call); }

void FenceStreamsAvx2() { Vec::Fence(); }

}  // namespace pqcached::kernels::internal

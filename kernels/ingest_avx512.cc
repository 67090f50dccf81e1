#include "kernels/simd_avx512.h"
// Vec comes first: what follows is written in terms of it.
#include "kernels/ingest_simd.h"

namespace pqcached::kernels::internal {

bool StagePartAvx512(const StageCall& call) { return StageByTypes(call); }

void StreamRowsAvx512(const StreamCall& call) { StreamStagedRows(call); }

void FenceStreamsAvx512() { Vec::Fence(); }

}  // namespace pqcached::kernels::internal

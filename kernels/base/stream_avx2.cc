#include "kernels/base/simd/simd_avx2.h"
// Vec must be included first: the next headers are written in terms of it.
#include "kernels/base/stream_simd.h"

namespace pqcached::kernels::internal {

void StreamRowsAvx2(const StreamCall& call) { StreamRowsOf(call); }

void FenceStreamsAvx2() { Vec::Fence(); }

}  // namespace pqcached::kernels::internal

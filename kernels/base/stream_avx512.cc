#include "kernels/base/simd/simd_avx512.h"
// Vec must be included first: the next headers are written in terms of it.
#include "kernels/base/stream_simd.h"

namespace pqcached::kernels::internal {

void StreamRowsAvx512(const StreamCall& call) { StreamRowsOf(call); }

void FenceStreamsAvx512() { Vec::Fence(); }

}  // namespace pqcached::kernels::internal

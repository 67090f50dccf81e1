#include "kernels/base/simd/simd_avx512.h"
// Vec must be included first: the next header is written in terms of it.
#include "kernels/rows/unpack_simd.h"

namespace pqcached::kernels::internal {

void UnpackAvx512(const UnpackCall& call) { UnpackInOrder(call); }

}  // namespace pqcached::kernels::internal

#include "kernels/base/simd/simd_avx2.h"
// Vec must be included first: the next headers are written in terms of it.
#include "kernels/train/rotate_simd.h"

namespace pqcached::kernels {

const RotateFn kRotateAvx2 = RotateWithVec;

}  // namespace pqcached::kernels

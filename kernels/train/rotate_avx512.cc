#include "kernels/base/simd/simd_avx512.h"
// Vec must be included first: the next headers are written in terms of it.
#include "kernels/train/rotate_simd.h"

namespace pqcached::kernels {

const RotateFn kRotateAvx512 = RotateWithVec;

}  // namespace pqcached::kernels

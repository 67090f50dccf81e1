#include "kernels/base/simd/simd_portable.h"
// Vec must be included first: the next headers are written in terms of it.
#include "kernels/train/rotate_simd.h"

namespace pqcached::kernels {

const RotateFn kRotatePortable = RotateWithVec;

}  // namespace pqcached::kernels

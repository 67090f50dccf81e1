#include "kernels/base/simd/simd_portable.h"
// Vec must be included first: the next headers are written in terms of it.
#include "kernels/attend/attend_simd.h"

namespace pqcached::kernels::internal {

void AttendPortable(const AttendCall& call) { AttendByType(call); }

}  // namespace pqcached::kernels::internal

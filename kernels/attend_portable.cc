#include "kernels/simd_portable.h"
// Vec comes first: what follows is written in terms of it.
#include "kernels/attend_simd.h"

namespace pqcached::kernels::internal {

void AttendPortable(const AttendCall& call) { AttendByType(call); }

}  // namespace pqcached::kernels::internal

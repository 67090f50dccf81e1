#include "kernels/base/simd/simd_portable.h"
// Vec must be included first: the next header is written in terms of it.
#include "kernels/attend/attend_range_simd.h"

namespace pqcached::kernels::internal {

void AttendRangePortable(const RangeCall& call) { AttendRangeByType(call); }

}  // namespace pqcached::kernels::internal

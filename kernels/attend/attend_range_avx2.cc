#include "kernels/base/simd/simd_avx2.h"
// Vec must be included first: the next header is written in terms of it.
#include "kernels/attend/attend_range_simd.h"

namespace pqcached::kernels::internal {

void AttendRangeAvx2(const RangeCall& call) { AttendRangeByType(call); }

}  // namespace pqcached::kernels::internal

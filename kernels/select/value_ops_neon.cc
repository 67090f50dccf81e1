// Group rules, threshold and positions over plain value arrays in NEON.
#include "kernels/base/simd/compress_neon.h"
#include "kernels/base/simd/simd_exp_neon.h"
#include "kernels/base/simd/simd_neon.h"
#include "kernels/base/simd/take_quota_neon.h"
#include "kernels/select/value_ops_simd.h"

namespace pqcached::kernels {

const ValueOps kValueOpsNeon = kValueOps;

}  // namespace pqcached::kernels

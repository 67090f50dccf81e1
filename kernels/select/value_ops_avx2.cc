// Group rules, threshold and positions over plain value arrays in AVX2.
#include "kernels/base/simd/compress_avx2.h"
#include "kernels/base/simd/simd_avx2.h"
#include "kernels/base/simd/simd_exp_avx2.h"
#include "kernels/base/simd/take_quota_bmi2.h"
#include "kernels/select/value_ops_simd.h"

namespace pqcached::kernels {

const ValueOps kValueOpsAvx2 = kValueOps;

}  // namespace pqcached::kernels

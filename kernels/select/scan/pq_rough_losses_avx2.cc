// Rough scores of one head in AVX2.
#include "kernels/base/simd/byte_table_avx2.h"
#include "kernels/base/simd/compress_avx2.h"
#include "kernels/select/scan/pq_rough_losses_simd.h"

namespace pqcached::kernels {

const LossOps kLossOpsAvx2 = kLossOps;

}  // namespace pqcached::kernels

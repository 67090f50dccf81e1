// Rough scores of one head in NEON.
#include "kernels/base/simd/byte_table_neon.h"
#include "kernels/base/simd/compress_neon.h"
#include "kernels/select/scan/pq_rough_losses_simd.h"

namespace pqcached::kernels {

const LossOps kLossOpsNeon = kLossOps;

}  // namespace pqcached::kernels

// Arithmetic over arrays of cells in AVX2.
#include "kernels/base/simd/compress_avx2.h"
#include "kernels/base/simd/simd_avx2.h"
#include "kernels/base/simd/simd_exp_avx2.h"
#include "kernels/select/cells/pq_cells_simd.h"

namespace pqcached::kernels {

const CellOps kCellOpsAvx2 = kCellOps;

}  // namespace pqcached::kernels

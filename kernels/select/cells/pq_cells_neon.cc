// Arithmetic over arrays of cells in NEON.
#include "kernels/base/simd/compress_neon.h"
#include "kernels/base/simd/simd_exp_neon.h"
#include "kernels/base/simd/simd_neon.h"
#include "kernels/select/cells/pq_cells_simd.h"

namespace pqcached::kernels {

const CellOps kCellOpsNeon = kCellOps;

}  // namespace pqcached::kernels

// Positions of member cells in AVX2.
#include "kernels/base/simd/byte_table_avx2.h"
#include "kernels/base/simd/take_quota_bmi2.h"
#include "kernels/select/cells/pq_cell_scan_simd.h"

namespace pqcached::kernels {

void ScanCellsAvx2(const CellMembers& members, const CellScanSpan& span, CellScanOutput& output) {
  ScanCells(members, span, output);
}

}  // namespace pqcached::kernels

// Positions of member cells in NEON.
#include "kernels/base/simd/byte_table_neon.h"
#include "kernels/base/simd/take_quota_neon.h"
#include "kernels/select/cells/pq_cell_scan_simd.h"

namespace pqcached::kernels {

void ScanCellsNeon(const CellMembers& members, const CellScanSpan& span, CellScanOutput& output) {
  ScanCells(members, span, output);
}

}  // namespace pqcached::kernels

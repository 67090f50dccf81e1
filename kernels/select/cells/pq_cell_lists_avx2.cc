// The same loops with the bit instructions of AVX2 machines: most of the work is the conversion of
// bitmaps to positions.
#include "kernels/select/cells/pq_cell_list_loops.h"

namespace pqcached::kernels {

void EmitCellListsAvx2(const CellListPage* pages, uint32_t page_count, CellListScratch& scratch,
                       CellScanOutput& output) {
  EmitCellLists<NoShort>(pages, page_count, scratch, output);
}

}  // namespace pqcached::kernels

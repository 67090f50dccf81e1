// The same loops with the bit instructions that come with AVX2: where a bitmap becomes positions,
// they are most of the work.
#include "kernels/pq_cell_list_loops.h"

namespace pqcached::kernels {

void EmitCellListsAvx2(const CellListPage* pages, uint32_t page_count, CellListScratch& scratch,
                       CellScanOutput& output) {
  EmitCellLists<NoShort>(pages, page_count, scratch, output);
}

}  // namespace pqcached::kernels

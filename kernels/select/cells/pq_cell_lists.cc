#include "kernels/select/cells/pq_cell_lists.h"

#include "kernels/select/cells/pq_cell_list_loops.h"

namespace pqcached::kernels {

void EmitCellListsPortable(const CellListPage* pages, uint32_t page_count, CellListScratch& scratch,
                           CellScanOutput& output) {
  EmitCellLists<NoShort>(pages, page_count, scratch, output);
}

}  // namespace pqcached::kernels

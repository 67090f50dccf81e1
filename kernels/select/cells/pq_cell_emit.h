// The last step of a selection over cells: converts member cells to positions, span by span, either
// by a scan of the codes or from inverted lists (posting lists), whichever costs less.
//
// Included by the files of PqSelect only.
#ifndef PQCACHED_KERNELS_SELECT_CELLS_PQ_CELL_EMIT_H_
#define PQCACHED_KERNELS_SELECT_CELLS_PQ_CELL_EMIT_H_

#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/base/exec.h"
#include "kernels/select/cells/pq_cell_lists.h"
#include "kernels/select/cells/pq_cells.h"
#include "kernels/select/pq_select_paths.h"

namespace pqcached::kernels {

// Data for the spans of one codebook; filled at its first span.
struct CodebookEmission {
  CellMembers members;
  CellScan scan;  // null: members are not filled
  ListedCells listed;
  uint32_t listed_tokens;  // candidates in the listed cells
  uint32_t all_tokens;
};

struct CellEmitTask {
  const Exec& exec;
  const CellOps& ops;
  const PqSelectArgs& args;
  const PqSelectPlan& plan;
  uint32_t cell_count;      // per codebook
  const uint32_t* tokens;   // [codebook, cell]
  const uint8_t* at_least;  // bits [codebook, cell], as written by CellOps::compare
  const uint8_t* above;
  const float* tables;  // [codebook, head of the plan, TableFloats], clamped
  CellThreshold threshold;
  std::span<CodebookEmission> codebooks;
  std::span<uint16_t> listed_cells;  // [codebook, cell]: storage for ListedCells
  CellListScratch* lists;
};

// Writes all args.positions.
void EmitCells(const CellEmitTask& task);

}  // namespace pqcached::kernels

#endif  // PQCACHED_KERNELS_SELECT_CELLS_PQ_CELL_EMIT_H_

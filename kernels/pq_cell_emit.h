// From member cells to positions: the last step of a selection over cells, span by span either by a
// pass over the codes or from posting lists, whichever costs less.
//
// Shared by the files of PqSelect; nobody else includes it.
#ifndef PQCACHED_KERNELS_PQ_CELL_EMIT_H_
#define PQCACHED_KERNELS_PQ_CELL_EMIT_H_

#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/exec.h"
#include "kernels/pq_cell_lists.h"
#include "kernels/pq_cells.h"
#include "kernels/pq_select_paths.h"

namespace pqcached::kernels {

// What a codebook's spans need; filled when the first of them asks.
struct CodebookEmission {
  CellMembers members;
  CellScan scan;  // null: members are not filled
  ListedCells listed;
  uint32_t listed_tokens;  // of candidates
  uint32_t all_tokens;
};

struct CellEmitTask {
  const Exec& exec;
  const CellOps& ops;
  const PqSelectArgs& args;
  const PqSelectPlan& plan;
  uint32_t cell_count;      // per codebook
  const uint32_t* tokens;   // [codebook, cell]
  const uint8_t* at_least;  // bits [codebook, cell], of CellOps::compare
  const uint8_t* above;
  const float* tables;  // [codebook, head of the plan, TableFloats], clamped
  CellThreshold threshold;
  std::span<CodebookEmission> codebooks;
  std::span<uint16_t> listed_cells;  // [codebook, cell]: room for ListedCells
  CellListScratch* lists;
};

// Writes all args.positions.
void EmitCells(const CellEmitTask& task);

}  // namespace pqcached::kernels

#endif  // PQCACHED_KERNELS_PQ_CELL_EMIT_H_

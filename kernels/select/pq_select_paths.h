// The implementations of PqSelect: by cells when the geometry has them, otherwise by rough scores,
// otherwise by the scores of all tokens.
//
// Included by the files of PqSelect only.
#ifndef PQCACHED_KERNELS_SELECT_PQ_SELECT_PATHS_H_
#define PQCACHED_KERNELS_SELECT_PQ_SELECT_PATHS_H_

#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/base/exec.h"
#include "kernels/select/pq_select.h"

namespace pqcached::kernels {

inline constexpr uint32_t kMaxGroupSize = 64;

// Properties of the arguments of PqSelect.
struct PqSelectPlan {
  uint32_t codebook_count = 0;
  uint32_t candidate_count = 0;
  // Number of heads after aggregation: 1 under kMeanLogit, whose tables are summed.
  uint32_t head_count = 0;
};

// Sets tables [codebook_count, plan.head_count, TableFloats] to the clamped entries, summed over
// the group under kMeanLogit.
void FillTables(const PqSelectArgs& args, const PqSelectPlan& plan, std::span<float> tables);

// Selects by the scores of all tokens.
// REQUIRES of all functions below: 1 <= positions.size() <= candidate_count; scratch of the
// matching function.
size_t ScoreAllScratchBytes(const PqSelectShape& shape);
void SelectByScores(const Exec& exec, const PqSelectArgs& args, const PqSelectPlan& plan);

// The same, in blocks that stay in the cache; not for Level::kReference.
size_t BlockSelectScratchBytes(const PqSelectShape& shape);
void SelectByBlocks(const Exec& exec, const PqSelectArgs& args, const PqSelectPlan& plan);

// The same, in one pass over the codes, with exact scores for few tokens only. Returns false when
// nothing is selected, because the instruction set has no such variant or because the selection
// cannot be proven right.
size_t RoughSelectScratchBytes(const PqSelectShape& shape);
bool SelectByRoughScores(const Exec& exec, const PqSelectArgs& args, const PqSelectPlan& plan);

// Returns the arithmetic over cells of the instruction set (pq_cells.h).
struct CellOps;
const CellOps& CellOpsFor(const Exec& exec);

struct SlotRange {
  uint32_t begin = 0;
  uint32_t end = 0;
};

// Adds `weight` to the count of the cell of every slot in `slots`. Only the planes of the span are
// read.
//
// REQUIRES: HasCells(geometry).
void AddCells(const PqGeometry& geometry, const PqSpan& span, SlotRange slots, uint32_t weight,
              std::span<uint32_t> counts);

// Selects over cells. REQUIRES: HasCells(geometry).
size_t CellSelectScratchBytes(const PqSelectShape& shape);
void SelectByCells(const Exec& exec, const PqSelectArgs& args, const PqSelectPlan& plan);

}  // namespace pqcached::kernels

#endif  // PQCACHED_KERNELS_SELECT_PQ_SELECT_PATHS_H_

// The ways through PqSelect: by cells where the geometry has them, else by rough scores, else by the
// scores of all tokens.
//
// Shared by the files of PqSelect; nobody else includes it.
#ifndef PQCACHED_KERNELS_PQ_SELECT_PATHS_H_
#define PQCACHED_KERNELS_PQ_SELECT_PATHS_H_

#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/exec.h"
#include "kernels/pq_select.h"

namespace pqcached::kernels {

inline constexpr uint32_t kMaxGroupSize = 64;

// What PqSelect found out about its arguments.
struct PqSelectPlan {
  uint32_t codebook_count = 0;
  uint32_t candidate_count = 0;
  // Heads left after the rule is taken into account: 1 under kMeanLogit, whose tables are summed.
  uint32_t head_count = 0;
};

// Sets tables [codebook_count, plan.head_count, TableFloats] to the clamped entries, summed over
// the group under kMeanLogit.
void FillTables(const PqSelectArgs& args, const PqSelectPlan& plan, std::span<float> tables);

// REQUIRES of all: 1 <= positions.size() <= candidate_count; scratch of the matching function.
size_t ScoreAllScratchBytes(const PqSelectShape& shape);
void SelectByScores(const Exec& exec, const PqSelectArgs& args, const PqSelectPlan& plan);

// The same with blocks that stay in the cache; not for Level::kReference.
size_t BlockSelectScratchBytes(const PqSelectShape& shape);
void SelectByBlocks(const Exec& exec, const PqSelectArgs& args, const PqSelectPlan& plan);

// The same in one pass over the codes, with exact scores for few tokens only. False: nothing is
// selected, because the level has no such form, or because it cannot be shown that the selection
// would be the right one.
size_t RoughSelectScratchBytes(const PqSelectShape& shape);
bool SelectByRoughScores(const Exec& exec, const PqSelectArgs& args, const PqSelectPlan& plan);

struct SlotRange {
  uint32_t begin = 0;
  uint32_t end = 0;
};

// Adds `weight` to the count of the cell of every slot in range; of the span only the planes are
// read.
//
// REQUIRES: HasCells(geometry).
void AddCells(const PqGeometry& geometry, const PqSpan& span, SlotRange slots, uint32_t weight,
              std::span<uint32_t> counts);

// REQUIRES: HasCells(geometry).
size_t CellSelectScratchBytes(const PqSelectShape& shape);
void SelectByCells(const Exec& exec, const PqSelectArgs& args, const PqSelectPlan& plan);

}  // namespace pqcached::kernels

#endif  // PQCACHED_KERNELS_PQ_SELECT_PATHS_H_

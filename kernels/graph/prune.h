// Pruner chooses diverse neighbours of a key among candidates.
//
// Included by the files of this folder only. It works in the scratch of a task.
#ifndef PQCACHED_KERNELS_GRAPH_PRUNE_H_
#define PQCACHED_KERNELS_GRAPH_PRUNE_H_

#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/base/scratch_cutter.h"
#include "kernels/graph/build_internal.h"
#include "kernels/graph/score_rows.h"

namespace pqcached::kernels::internal {

class Pruner {
 public:
  Pruner(const BuildTask& task, ScratchCutter* cutter);
  static size_t ScratchBytes(const GraphBuildSize& size);

  // Candidates of the next Choose: at most MostPruned, distinct, without the key itself.
  std::span<uint32_t> candidates() const { return candidates_; }

  // Goes through the first `count` candidates by ascending distance to `key` (squared, Euclidean;
  // ties: the lower node), and chooses each that is not *occluded*: no chosen one is nearer to it
  // than `key` is. Stops at `most`. With `fill`, the nearest occluded ones follow if there is room.
  // Returns the chosen ones, valid until the next call.
  std::span<const uint32_t> Choose(uint32_t key, uint32_t count, uint32_t most, bool fill);

 private:
  void SortByDistance(uint32_t key, uint32_t count);
  void MarkOccluded(uint32_t chosen, uint32_t count);
  // Sets scores_[i] = key . candidates_[i] for i in [first, count).
  void ScoreCandidates(uint32_t key, uint32_t first, uint32_t count);

  const BuildTask& task_;
  const RowScorer scorer_;
  std::span<uint32_t> candidates_;  // by ascending distance, once sorted
  std::span<uint64_t> order_;
  std::span<float> distances_;  // to the key
  std::span<float> scores_;
  std::span<const std::byte*> rows_;
  std::span<uint8_t> state_;
  std::span<uint32_t> chosen_;
  std::span<float> query_;
  std::span<float> prepared_;
};

}  // namespace pqcached::kernels::internal

#endif  // PQCACHED_KERNELS_GRAPH_PRUNE_H_

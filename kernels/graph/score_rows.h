// Scores of one query with rows at any addresses: what a walk over a graph computes.
//
// Included by the files of this folder only. exact_score.h scores rows in ascending order for a
// group of queries; a walk knows only a few rows at a time, of one query, in any order.
#ifndef PQCACHED_KERNELS_GRAPH_SCORE_ROWS_H_
#define PQCACHED_KERNELS_GRAPH_SCORE_ROWS_H_

#include <cstddef>
#include <cstdint>

#include "kernels/base/dtype.h"
#include "kernels/base/exec.h"

namespace pqcached::kernels {

struct ScoreRowsCall {
  uint32_t key_dim;
  const float* query;            // from `prepare`
  const std::byte* const* rows;  // [count], any alignment
  uint32_t count;
  float* scores;  // [count], overwritten
};

struct RowScorer {
  // Writes scale * query[0, key_dim) to `prepared`, which has ScoreRowsQueryFloats(key_dim).
  void (*prepare)(const float* query, uint32_t key_dim, float scale, float* prepared);
  // Sets scores[i] = scale * query . rows[i], as exactly as ExactScores.
  void (*score)(const ScoreRowsCall& call);
};

constexpr size_t ScoreRowsQueryFloats(uint32_t key_dim) { return (size_t{key_dim} + 31) / 32 * 32; }

// Returns the functions for rows of `dtype`.
RowScorer RowScorerFor(const Exec& exec, DType dtype);

namespace internal {

RowScorer RowScorerPortable(DType dtype);
RowScorer RowScorerAvx2(DType dtype);
RowScorer RowScorerAvx512(DType dtype);
RowScorer RowScorerAvx512Bf16();  // for bf16 rows

}  // namespace internal

}  // namespace pqcached::kernels

#endif  // PQCACHED_KERNELS_GRAPH_SCORE_ROWS_H_

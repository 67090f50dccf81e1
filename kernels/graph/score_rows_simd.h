// Scores of rows at any addresses, written once for every Vec (score_rows.h).
//
// Include after one of simd_*.h; everything is local to the including file.
#ifndef PQCACHED_KERNELS_GRAPH_SCORE_ROWS_SIMD_H_
#define PQCACHED_KERNELS_GRAPH_SCORE_ROWS_SIMD_H_

#include <cstddef>
#include <cstdint>

#include "kernels/base/simd/dot_simd.h"
#include "kernels/graph/score_rows.h"

namespace pqcached::kernels {
namespace {

template <class Dots>
void ScoreRowsWith(const ScoreRowsCall& call) {
  constexpr uint32_t kRows = Vec::kAccumulators;
  uint32_t first = 0;
  for (; first + kRows <= call.count; first += kRows) {
    Dots::template Tile<1>(call.query, 0, call.key_dim, call.rows + first, call.scores + first,
                           kRows);
  }
  const uint32_t left = call.count - first;
  if (left == 0) return;
  // The last tile repeats its last row.
  const std::byte* rows[kRows];
  float scores[kRows];
  for (uint32_t i = 0; i < kRows; ++i) rows[i] = call.rows[first + (i < left ? i : left - 1)];
  Dots::template Tile<1>(call.query, 0, call.key_dim, rows, scores, kRows);
  for (uint32_t i = 0; i < left; ++i) call.scores[first + i] = scores[i];
}

template <class Dots>
RowScorer RowScorerWith() {
  return {Dots::PrepareQuery, ScoreRowsWith<Dots>};
}

inline RowScorer RowScorerByType(DType dtype) {
  switch (dtype) {
    case DType::kF16:
      return RowScorerWith<FmaDots<DType::kF16>>();
    case DType::kBf16:
      return RowScorerWith<FmaDots<DType::kBf16>>();
    case DType::kF32:
      break;
  }
  return RowScorerWith<FmaDots<DType::kF32>>();
}

}  // namespace
}  // namespace pqcached::kernels

#endif  // PQCACHED_KERNELS_GRAPH_SCORE_ROWS_SIMD_H_

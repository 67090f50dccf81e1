// Exact scores: logits of a group of query heads against keys.
//
// ExactScores reads consecutive rows: for the flat index, and as the ground truth for every other
// index. ExactScoresAt reads the rows of chosen tokens in place: for re-ranking. Each key is read
// once for the whole group.
//
// Stateless; thread-safe as long as outputs and scratch are not shared.
#ifndef PQCACHED_KERNELS_SELECT_EXACT_EXACT_SCORE_H_
#define PQCACHED_KERNELS_SELECT_EXACT_EXACT_SCORE_H_

#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/base/dtype.h"
#include "kernels/base/exec.h"
#include "kernels/base/row_span.h"

namespace pqcached::kernels {

struct ExactScoreArgs {
  DType dtype = DType::kF16;
  uint32_t key_dim = 0;         // 32..256, multiple of 8
  size_t row_stride_bytes = 0;  // >= key_dim * DTypeBytes(dtype): the key is the start of a row
  uint32_t group_size = 1;      // G >= 1
  uint32_t token_count = 0;
  float scale = 1.0f;
  std::span<const float> queries;   // [G, key_dim]
  const std::byte* rows = nullptr;  // ExactScores: row of the first token, any alignment
  // ExactScoresAt: the rows of token_count positions, which are ascending and inside the spans.
  std::span<const RowSpan> spans = {};
  std::span<const uint32_t> positions = {};
  size_t score_stride =
      0;  // >= token_count: distance between the scores of two query heads, in floats
  std::span<float> scores;       // [G, score_stride]; [g, t] is overwritten for t < token_count
  std::span<std::byte> scratch;  // at least ExactScoreScratchBytes(G, key_dim), any alignment
};

size_t ExactScoreScratchBytes(uint32_t group_size, uint32_t key_dim);

// Sets scores[g, t] = scale * q_g . key_t, with fp32 products and sums (kReference: double). On
// kAvx512Bf16 with bf16 rows the query is split into two bf16 parts. The error is at most 1e-5 *
// |scale| * |q| * |key|, and 3e-5 * |scale| * |q| * |key| with bf16 dot products.
void ExactScores(const Exec& exec, const ExactScoreArgs& args);
// Sets scores[g, i] = scale * q_g . key of positions[i], as exactly as ExactScores.
void ExactScoresAt(const Exec& exec, const ExactScoreArgs& args);

}  // namespace pqcached::kernels

#endif  // PQCACHED_KERNELS_SELECT_EXACT_EXACT_SCORE_H_

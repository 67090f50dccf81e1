// Exact scores, written once for every Vec: tiles of up to four queries and a few rows
// (dot_simd.h), with the keys of later rows prefetched into L2.
//
// Include after one of simd_*.h; everything is local to the including file.
#ifndef PQCACHED_KERNELS_EXACT_SCORE_SIMD_H_
#define PQCACHED_KERNELS_EXACT_SCORE_SIMD_H_

#include <cstddef>
#include <cstdint>

#include "kernels/dot_simd.h"
#include "kernels/exact_score_internal.h"

namespace pqcached::kernels {
namespace {

using internal::ExactScoreCall;

constexpr uint32_t kStripTokens = 16;     // rows that all queries visit before the next ones
constexpr uint32_t kPrefetchTokens = 32;  // how far ahead keys are prefetched

// Scores of kQueries queries from `head` on, for the strip whose rows are given; the tile may write
// all kStripTokens columns.
template <class Dots, int kQueries>
void ScoreStrip(const ExactScoreCall& call, uint32_t head, const std::byte* const* rows,
                float* scores, size_t score_stride) {
  constexpr uint32_t kRows = Vec::kAccumulators / static_cast<uint32_t>(kQueries);
  const size_t query_stride = PaddedDim(call.key_dim);
  for (uint32_t t = 0; t < kStripTokens; t += kRows) {
    Dots::template Tile<kQueries>(call.scratch + head * query_stride, query_stride, call.key_dim,
                                  rows + t, scores + t, score_stride);
  }
}

template <class Dots>
void ScoreAllHeads(const ExactScoreCall& call, const std::byte* const* rows, uint32_t count,
                   uint32_t first) {
  for (uint32_t head = 0; head < call.group_size;) {
    const uint32_t left = call.group_size - head;
    const uint32_t queries = left >= 4 ? 4 : left >= 2 ? 2 : 1;
    float partial[4 * kStripTokens];
    const bool whole = count == kStripTokens;
    float* scores = whole ? call.scores + head * call.score_stride + first : partial;
    const size_t stride = whole ? call.score_stride : kStripTokens;
    if (queries == 4) {
      ScoreStrip<Dots, 4>(call, head, rows, scores, stride);
    } else if (queries == 2) {
      ScoreStrip<Dots, 2>(call, head, rows, scores, stride);
    } else {
      ScoreStrip<Dots, 1>(call, head, rows, scores, stride);
    }
    for (uint32_t q = 0; !whole && q < queries; ++q) {
      float* to = call.scores + (head + q) * call.score_stride + first;
      for (uint32_t i = 0; i < count; ++i) to[i] = partial[q * kStripTokens + i];
    }
    head += queries;
  }
}

template <class Dots>
void ExactScoresWith(const ExactScoreCall& call, uint32_t key_bytes) {
  for (uint32_t head = 0; head < call.group_size; ++head) {
    Dots::PrepareQuery(call.queries + size_t{head} * call.key_dim, call.key_dim, call.scale,
                       call.scratch + size_t{head} * PaddedDim(call.key_dim));
  }
  const std::byte* rows[kStripTokens];
  for (uint32_t first = 0; first < call.token_count; first += kStripTokens) {
    const uint32_t left = call.token_count - first;
    const uint32_t count = left < kStripTokens ? left : kStripTokens;
    const std::byte* row = call.rows + first * call.row_stride_bytes;
    for (uint32_t i = 0; i < kStripTokens; ++i) {
      rows[i] = row;
      if (i + 1 < count) row += call.row_stride_bytes;
    }
    if (left > kPrefetchTokens + kStripTokens) {
      for (uint32_t i = 0; i < kStripTokens; ++i) {
        const std::byte* ahead = rows[i] + kPrefetchTokens * call.row_stride_bytes;
        for (uint32_t byte = 0; byte < key_bytes; byte += 64) Vec::Prefetch(ahead + byte);
      }
    }
    ScoreAllHeads<Dots>(call, rows, count, first);
  }
}

inline void ExactScoresByType(const ExactScoreCall& call) {
  switch (call.dtype) {
    case DType::kF16:
      return ExactScoresWith<FmaDots<DType::kF16>>(call, call.key_dim * 2);
    case DType::kBf16:
      return ExactScoresWith<FmaDots<DType::kBf16>>(call, call.key_dim * 2);
    case DType::kF32:
      return ExactScoresWith<FmaDots<DType::kF32>>(call, call.key_dim * 4);
  }
}

}  // namespace
}  // namespace pqcached::kernels

#endif  // PQCACHED_KERNELS_EXACT_SCORE_SIMD_H_

// Exact scores, written once for every Vec: tiles of up to four queries and a few rows
// (dot_simd.h), with the keys of later rows prefetched into L2.
//
// Include after one of simd_*.h; everything is local to the including file.
#ifndef PQCACHED_KERNELS_SELECT_EXACT_EXACT_SCORE_SIMD_H_
#define PQCACHED_KERNELS_SELECT_EXACT_EXACT_SCORE_SIMD_H_

#include <cstddef>
#include <cstdint>

#include "kernels/attend/prefetch_simd.h"
#include "kernels/base/simd/dot_simd.h"
#include "kernels/select/exact/exact_score_internal.h"

namespace pqcached::kernels {
namespace {

using internal::ExactScoreCall;

// Computes the scores of one block for kQueries queries from `head` on. The tiles may write all
// kBlockRows columns.
template <class Dots, int kQueries>
PQC_INLINE void ScoreBlock(const ExactScoreCall& call, uint32_t head, const std::byte* const* rows,
                           uint32_t count, Prefetcher* ahead, uint32_t columns, float* scores,
                           size_t score_stride) {
  constexpr uint32_t kRows = Vec::kAccumulators / static_cast<uint32_t>(kQueries);
  const size_t query_stride = PaddedDim(call.key_dim);
  for (uint32_t t = 0; t < count; t += kRows) {
    if (ahead != nullptr) ahead->Advance(kRows * columns);
    Dots::template Tile<kQueries>(call.scratch + head * query_stride, query_stride, call.key_dim,
                                  rows + t, scores + t, score_stride);
  }
}

// Processes all heads over one block; the first tiles prefetch the next block, if there is one.
template <class Dots>
void ScoreAllHeads(const ExactScoreCall& call, const std::byte* const* rows, uint32_t first,
                   uint32_t count, Prefetcher* ahead, uint32_t columns) {
  const bool whole = count == kBlockRows;
  for (uint32_t head = 0; head < call.group_size; ahead = nullptr) {
    const uint32_t left = call.group_size - head;
    const uint32_t queries = left >= 4 ? 4 : left >= 2 ? 2 : 1;
    float partial[4 * kBlockRows];
    float* scores = whole ? call.scores + head * call.score_stride + first : partial;
    const size_t stride = whole ? call.score_stride : kBlockRows;
    if (queries == 4) {
      ScoreBlock<Dots, 4>(call, head, rows, count, ahead, columns, scores, stride);
    } else if (queries == 2) {
      ScoreBlock<Dots, 2>(call, head, rows, count, ahead, columns, scores, stride);
    } else {
      ScoreBlock<Dots, 1>(call, head, rows, count, ahead, columns, scores, stride);
    }
    for (uint32_t q = 0; !whole && q < queries; ++q) {
      float* to = call.scores + (head + q) * call.score_stride + first;
      for (uint32_t i = 0; i < count; ++i) to[i] = partial[q * kBlockRows + i];
    }
    head += queries;
  }
}

// Finds the rows of all tokens, block by block.
struct RowFeed {
  const ExactScoreCall& call;
  const RowSpan* span;
  uint32_t next = 0;

  // Sets rows[0, kBlockRows) to the next rows; entries past the end repeat the last row.
  void Fill(const std::byte** rows) {
    const uint32_t left = call.token_count - next;
    const uint32_t count = left < kBlockRows ? left : kBlockRows;
    if (call.rows != nullptr) {
      const std::byte* row = call.rows + next * call.row_stride_bytes;
      for (uint32_t i = 0; i < count; ++i, row += call.row_stride_bytes) rows[i] = row;
    } else {
      FindRows(call.positions + next, count, rows);
    }
    for (uint32_t i = count; i < kBlockRows; ++i) rows[i] = rows[count - 1];
    next += count;
  }

  void FindRows(const uint32_t* positions, uint32_t count, const std::byte** rows) {
    RowSpan current = *span;
    for (uint32_t i = 0; i < count; ++i) {
      while (positions[i] - current.first_position >= current.token_count) current = *++span;
      rows[i] =
          current.rows + size_t{positions[i] - current.first_position} * call.row_stride_bytes;
    }
  }
};

template <class Dots>
void ExactScoresWith(const ExactScoreCall& call, uint32_t key_bytes) {
  for (uint32_t head = 0; head < call.group_size; ++head) {
    Dots::PrepareQuery(call.queries + size_t{head} * call.key_dim, call.key_dim, call.scale,
                       call.scratch + size_t{head} * PaddedDim(call.key_dim));
  }
  // The bytes between the keys of consecutive rows are prefetched too, unless they exceed the keys:
  // a Zen 4 reads keys of 256 bytes out of rows of 512 in 20 ns per row this way, and in 47 ns when
  // only the lines of the keys are prefetched.
  const bool whole_rows = call.rows != nullptr && call.row_stride_bytes <= 2 * size_t{key_bytes};
  const uint32_t columns =
      Prefetcher::Columns(whole_rows ? static_cast<uint32_t>(call.row_stride_bytes) : key_bytes);
  const std::byte* rows[2][kBlockRows];
  uint32_t current = 0;
  RowFeed feed{call, call.spans};
  if (call.token_count > 0) {
    feed.Fill(rows[0]);
    Prefetcher{rows[0]}.Advance(kBlockRows * columns);
  }
  for (uint32_t first = 0; first < call.token_count; first += kBlockRows) {
    const uint32_t left = call.token_count - first;
    const uint32_t count = left < kBlockRows ? left : kBlockRows;
    const bool more = left > kBlockRows;
    if (more) feed.Fill(rows[1 - current]);
    Prefetcher ahead{rows[1 - current]};
    ScoreAllHeads<Dots>(call, rows[current], first, count, more ? &ahead : nullptr, columns);
    current = 1 - current;
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

#endif  // PQCACHED_KERNELS_SELECT_EXACT_EXACT_SCORE_SIMD_H_

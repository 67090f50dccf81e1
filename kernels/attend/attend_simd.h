// Attention over rows by address, written once for every Vec.
//
// Rows are processed in blocks of kBlockRows. During the work on a block (dot products, online
// softmax, weighted sum of values, for up to four heads at a time), the rows of the next block are
// prefetched into L2, keys during the dot products and values during the sum, so that memory is
// always busy. Without prefetching, every few rows cost a full memory latency.
//
// The parameter `Math` defines how products are computed; FmaMath works for all dtypes. Include
// after one of simd_*.h; everything is local to the including file.
#ifndef PQCACHED_KERNELS_ATTEND_ATTEND_SIMD_H_
#define PQCACHED_KERNELS_ATTEND_ATTEND_SIMD_H_

#include <cstddef>
#include <cstdint>

#include "kernels/attend/attend_internal.h"
#include "kernels/attend/prefetch_simd.h"
#include "kernels/attend/softmax_simd.h"
#include "kernels/base/simd/dot_simd.h"

namespace pqcached::kernels {
namespace {

using internal::AttendCall;
using internal::AttendHead;

// Scratch of one pass, for `head_count` heads.
struct Workspace {
  float* queries;     // [heads, PaddedDim(key_dim)], in the format of Math
  float* values;      // [heads, PaddedDim(value_dim)] weighted sums, in the order of Math
  float* logits;      // [heads, kBlockRows], then the weights in the format of Math
  AttendHead* heads;  // [heads]
  uint32_t query_stride;
  uint32_t value_stride;
};

// Produces the addresses of the rows to attend to, in order.
struct RowCursor {
  const AttendCall& call;
  size_t span_index = 0;
  size_t next = 0;  // index into positions, or row of the current span

  // Sets rows[0, kBlockRows) and returns the number of valid ones; the entries after them repeat
  // the last valid row.
  uint32_t Fill(const std::byte** rows) {
    if (!call.all_rows && next == call.position_count) return 0;
    const uint32_t count = call.all_rows ? FillAll(rows) : FillByPositions(rows);
    if (count == 0) return 0;
    for (uint32_t i = count; i < kBlockRows; ++i) rows[i] = rows[count - 1];
    return count;
  }

  uint32_t FillByPositions(const std::byte** rows) {
    const size_t left = call.position_count - next;
    const uint32_t count = left < kBlockRows ? static_cast<uint32_t>(left) : kBlockRows;
    const uint32_t* positions = call.positions + next;
    const size_t stride = call.row_stride_bytes;
    const RowSpan* next_span = call.spans + span_index;
    RowSpan span = *next_span;
    for (uint32_t i = 0; i < count; ++i) {
      while (positions[i] - span.first_position >= span.token_count) span = *++next_span;
      rows[i] = span.rows + size_t{positions[i] - span.first_position} * stride;
    }
    span_index = static_cast<size_t>(next_span - call.spans);
    next += count;
    return count;
  }

  uint32_t FillAll(const std::byte** rows) {
    const size_t stride = call.row_stride_bytes;
    uint32_t count = 0;
    for (; span_index < call.span_count; ++span_index, next = 0) {
      const RowSpan span = call.spans[span_index];
      const std::byte* row = span.rows + next * stride;
      const size_t end = span.token_count - next < kBlockRows - count
                             ? count + (span.token_count - next)
                             : kBlockRows;
      next += end - count;
      for (; count < end; ++count, row += stride) rows[count] = row;
      if (count == kBlockRows) break;
    }
    return count;
  }
};

// Products in fp32, for rows of any dtype.
template <DType kType>
struct FmaMath {
  static constexpr uint32_t kElementBytes = kType == DType::kF32 ? 4 : 2;
  static constexpr bool kScalesLogits = false;  // the scale is a part of the query
  using Dots = FmaDots<kType>;

  // Leaves the weights unchanged.
  PQC_INLINE float PackWeights(float*, float weight_sum) { return weight_sum; }

  // Adds weighted values of dims [dim, dim + kVectors * kLanes) to the sums.
  template <int kHeads, int kVectors, bool kHalf, bool kPrefetch>
  PQC_INLINE void AddValues(const Workspace& work, uint32_t head, const AttendCall& call,
                            uint32_t dim, const std::byte* const* rows, uint32_t count,
                            Prefetcher* ahead) {
    using F = Vec::F;
    const uint32_t columns = Prefetcher::Columns(call.value_dim * kElementBytes);
    float* values = work.values + size_t{head} * work.value_stride + dim;
    const float* weights = work.logits + size_t{head} * kBlockRows;
    F sums[kHeads][kVectors];
#pragma GCC unroll 4
    for (int q = 0; q < kHeads; ++q) {
      const F rescale = Vec::Set(work.heads[head + static_cast<uint32_t>(q)].rescale);
#pragma GCC unroll 16
      for (int v = 0; v < kVectors; ++v) {
        const float* from = values + static_cast<uint32_t>(q) * work.value_stride +
                            static_cast<uint32_t>(v) * Vec::kLanes;
        sums[q][v] = Vec::Load(from) * rescale;
      }
    }
    for (uint32_t t = 0; t < count; ++t) {
      if constexpr (kPrefetch) ahead->Advance(columns);
      F value[kVectors];
#pragma GCC unroll 16
      for (int v = 0; v < kVectors; ++v) {
        const std::byte* const from = rows[t] + call.value_offset_bytes;
        const uint32_t index = dim + static_cast<uint32_t>(v) * Vec::kLanes;
        value[v] = kHalf ? Vec::LoadRowHalf<kType>(from, index) : Vec::LoadRow<kType>(from, index);
      }
#pragma GCC unroll 4
      for (int q = 0; q < kHeads; ++q) {
        const F weight = Vec::Set(weights[static_cast<uint32_t>(q) * kBlockRows + t]);
#pragma GCC unroll 16
        for (int v = 0; v < kVectors; ++v) {
          sums[q][v] = Vec::MulAdd(weight, value[v], sums[q][v]);
        }
      }
    }
#pragma GCC unroll 4
    for (int q = 0; q < kHeads; ++q) {
#pragma GCC unroll 16
      for (int v = 0; v < kVectors; ++v) {
        Vec::Store(values + static_cast<uint32_t>(q) * work.value_stride +
                       static_cast<uint32_t>(v) * Vec::kLanes,
                   sums[q][v]);
      }
    }
  }

  template <int kHeads, bool kPrefetch>
  static void Values(const Workspace& work, uint32_t head, const AttendCall& call,
                     const std::byte* const* rows, uint32_t count, Prefetcher* ahead) {
    constexpr int kWide = static_cast<int>(Vec::kAccumulators) / kHeads > 8
                              ? 8
                              : static_cast<int>(Vec::kAccumulators) / kHeads;
    constexpr uint32_t kStep = static_cast<uint32_t>(kWide) * Vec::kLanes;
    uint32_t dim = 0;
    if (kStep <= call.value_dim) {
      AddValues<kHeads, kWide, false, kPrefetch>(work, head, call, 0, rows, count, ahead);
      dim = kStep;
    } else if (kPrefetch) {
      ahead->Advance(kBlockRows * Prefetcher::Columns(call.value_dim * kElementBytes));
    }
    for (; dim + kStep <= call.value_dim; dim += kStep) {
      AddValues<kHeads, kWide, false, false>(work, head, call, dim, rows, count, nullptr);
    }
    for (; dim + Vec::kLanes <= call.value_dim; dim += Vec::kLanes) {
      AddValues<kHeads, 1, false, false>(work, head, call, dim, rows, count, nullptr);
    }
    if (dim < call.value_dim) {
      AddValues<kHeads, 1, true, false>(work, head, call, dim, rows, count, nullptr);
    }
  }

  // Sets output[0, dim) = factor * sums, in the order of dims.
  static void Finish(const float* sums, uint32_t dim, float factor, float* output) {
    for (uint32_t i = 0; i < dim; ++i) output[i] = sums[i] * factor;
  }
};

// Converts the logits of a block to weights and updates the head's state. Given logits are final.
template <class Math, bool kGiven>
PQC_INLINE void UpdateSoftmax(const Workspace& work, uint32_t head, uint32_t count,
                              const AttendCall& call) {
  using F = Vec::F;
  float* logits = work.logits + size_t{head} * kBlockRows;
  AttendHead& state = work.heads[head];
  if constexpr (Math::kScalesLogits && !kGiven) {
    for (uint32_t i = 0; i < count; i += Vec::kLanes) {
      Vec::Store(logits + i, Vec::Load(logits + i) * Vec::Set(call.scale));
    }
  }
  if (!kGiven && call.softcap > 0.0f) {
    for (uint32_t i = 0; i < count; i += Vec::kLanes) {
      Vec::Store(logits + i, Softcap(Vec::Load(logits + i), call.softcap));
    }
  }
  for (uint32_t i = count; i < kBlockRows; ++i) logits[i] = -kInfinity;
  F most = Vec::Set(state.largest);
#pragma GCC unroll 2
  for (uint32_t i = 0; i < kBlockRows; i += Vec::kLanes)
    most = Vec::Max(Vec::Load(logits + i), most);
  float largest = Vec::Largest(most);
  if (largest > kLargestFloat) largest = kLargestFloat;
  const float base = largest == -kInfinity ? 0.0f : largest;
  F sum = Vec::Set(0.0f);
#pragma GCC unroll 2
  for (uint32_t i = 0; i < kBlockRows; i += Vec::kLanes) {
    const F x = Vec::Min(Vec::Load(logits + i), Vec::Set(kLargestFloat));
    const F weight = Exp(x - Vec::Set(base));
    sum += weight;
    Vec::Store(logits + i, weight);
  }
  const float weight_sum = Vec::Sum(sum);
  const float norm_sum = Math::PackWeights(logits, weight_sum);
  float rescale = 1.0f;
  if (largest != state.largest) {
    float lanes[Vec::kLanes];
    Vec::Store(lanes, Exp(Vec::Set(state.largest - base)));
    rescale = lanes[0];
  }
  state.rescale = rescale;
  state.largest = largest;
  state.weight_sum = state.weight_sum * rescale + weight_sum;
  state.norm_sum = state.norm_sum * rescale + norm_sum;
}

// Rows of a block; `ahead` prefetches those of the next one.
struct Block {
  const std::byte* const* rows;
  uint32_t first;  // ordinal of the first row among those of the call
  uint32_t count;
  Prefetcher* ahead;
};

// Sets the logits of one block for kHeads heads: to the given ones, or to those of its keys.
template <class Math, int kHeads, bool kPrefetch, bool kGiven>
PQC_INLINE void SetLogits(const Workspace& work, uint32_t head, const AttendCall& call,
                          const Block& block) {
  float* logits = work.logits + size_t{head} * kBlockRows;
  if constexpr (kGiven) {
    for (uint32_t q = 0; q < static_cast<uint32_t>(kHeads); ++q) {
      const float* given = call.logits + (head + q) * call.position_count + block.first;
      for (uint32_t i = 0; i < block.count; ++i) logits[q * kBlockRows + i] = given[i];
    }
    return;
  }
  constexpr uint32_t kRows = Vec::kAccumulators / static_cast<uint32_t>(kHeads);
  for (uint32_t t = 0; t < block.count; t += kRows) {
    if constexpr (kPrefetch) {
      block.ahead->Advance(kRows * Prefetcher::Columns(call.key_dim * Math::kElementBytes));
    }
    Math::Dots::template Tile<kHeads>(work.queries + size_t{head} * work.query_stride,
                                      work.query_stride, call.key_dim, block.rows + t, logits + t,
                                      kBlockRows);
  }
}

// Processes one block for kHeads heads. When kPrefetch is set, the next block is prefetched during
// the work.
template <class Math, int kHeads, bool kPrefetch, bool kGiven>
void AttendBlock(const Workspace& work, uint32_t head, const AttendCall& call, const Block& block) {
  SetLogits<Math, kHeads, kPrefetch, kGiven>(work, head, call, block);
  for (uint32_t q = 0; q < static_cast<uint32_t>(kHeads); ++q) {
    UpdateSoftmax<Math, kGiven>(work, head + q, block.count, call);
  }
  Math::template Values<kHeads, kPrefetch>(work, head, call, block.rows, block.count, block.ahead);
}

template <class Math, bool kPrefetch, bool kGiven>
uint32_t AttendBlockWidest(const Workspace& work, uint32_t head, const AttendCall& call,
                           const Block& block) {
  const uint32_t left = call.head_count - head;
  if (left >= 4) {
    AttendBlock<Math, 4, kPrefetch, kGiven>(work, head, call, block);
    return 4;
  }
  if (left >= 2) {
    AttendBlock<Math, 2, kPrefetch, kGiven>(work, head, call, block);
    return 2;
  }
  AttendBlock<Math, 1, kPrefetch, kGiven>(work, head, call, block);
  return 1;
}

inline Workspace CarveScratch(const AttendCall& call) {
  Workspace work;
  work.query_stride = PaddedDim(call.key_dim);
  work.value_stride = PaddedDim(call.value_dim);
  float* next = reinterpret_cast<float*>(call.scratch);
  work.queries = next;
  next += size_t{call.head_count} * work.query_stride;
  work.values = next;
  next += size_t{call.head_count} * work.value_stride;
  work.logits = next;
  next += size_t{call.head_count} * kBlockRows;
  work.heads = reinterpret_cast<AttendHead*>(next);
  return work;
}

template <class Math>
void FinishHead(const AttendCall& call, const Workspace& work, uint32_t head) {
  const AttendHead& state = work.heads[head];
  const bool any = state.weight_sum > 0.0f;
  Math::Finish(work.values + size_t{head} * work.value_stride, call.value_dim,
               any ? 1.0f / state.norm_sum : 0.0f, call.output + size_t{head} * call.value_dim);
  call.lse[head] = any ? state.largest + __builtin_logf(state.weight_sum) : -kInfinity;
}

// Prepares the queries and empty sums of all heads.
template <class Math, bool kGiven>
void BeginHeads(const AttendCall& call, const Workspace& work) {
  for (uint32_t head = 0; head < call.head_count; ++head) {
    if constexpr (!kGiven) {
      Math::Dots::PrepareQuery(call.queries + size_t{head} * call.key_dim, call.key_dim,
                               Math::kScalesLogits ? 1.0f : call.scale,
                               work.queries + size_t{head} * work.query_stride);
    }
    float* values = work.values + size_t{head} * work.value_stride;
    for (uint32_t i = 0; i < work.value_stride; ++i) values[i] = 0.0f;
    work.heads[head] = AttendHead{-kInfinity, 0.0f, 0.0f, 1.0f};
  }
}

template <class Math, bool kGiven>
void AttendRowsWith(const AttendCall& call) {
  const Workspace work = CarveScratch(call);
  BeginHeads<Math, kGiven>(call, work);
  RowCursor feed{call};
  const std::byte* rows[2][kBlockRows];
  uint32_t current = 0, first = 0;
  uint32_t count = feed.Fill(rows[0]);
  // With given logits, only the values are read.
  const auto key_bytes = static_cast<uint32_t>(call.key_dim * Math::kElementBytes);
  const auto value_bytes = static_cast<uint32_t>(call.value_dim * Math::kElementBytes);
  const auto adjacent = static_cast<ptrdiff_t>(key_bytes);
  // Values that directly follow the keys are prefetched with them, column by column.
  const bool is_split = call.value_offset_bytes != adjacent;
  const uint32_t key_end =
      is_split ? Prefetcher::Columns(key_bytes) * Prefetcher::kColumnBytes : Prefetcher::kNoEnd;
  const ptrdiff_t jump = is_split ? call.value_offset_bytes - key_end : 0;
  const uint32_t skipped = !kGiven ? 0 : is_split ? key_end : key_bytes;
  const auto prefetcher = [&](const std::byte* const* block) {
    return Prefetcher{block, 0, skipped, key_end, jump};
  };
  if (count > 0) {
    const uint32_t row_bytes = (is_split ? key_end : key_bytes) + value_bytes - skipped;
    prefetcher(rows[0]).Advance(kBlockRows * Prefetcher::Columns(row_bytes));
  }
  while (count > 0) {
    const uint32_t ahead_count = feed.Fill(rows[1 - current]);
    Prefetcher ahead = prefetcher(rows[1 - current]);
    const Block block{rows[current], first, count, &ahead};
    uint32_t head =
        ahead_count > 0 ? AttendBlockWidest<Math, true, kGiven>(work, 0, call, block) : 0;
    while (head < call.head_count) {
      head += AttendBlockWidest<Math, false, kGiven>(work, head, call, block);
    }
    current = 1 - current;
    first += count;
    count = ahead_count;
  }
  for (uint32_t head = 0; head < call.head_count; ++head) FinishHead<Math>(call, work, head);
}

template <class Math>
void AttendWith(const AttendCall& call) {
  return call.logits == nullptr ? AttendRowsWith<Math, false>(call)
                                : AttendRowsWith<Math, true>(call);
}

inline void AttendByType(const AttendCall& call) {
  switch (call.dtype) {
    case DType::kF16:
      return AttendWith<FmaMath<DType::kF16>>(call);
    case DType::kBf16:
      return AttendWith<FmaMath<DType::kBf16>>(call);
    case DType::kF32:
      return AttendWith<FmaMath<DType::kF32>>(call);
  }
}

}  // namespace
}  // namespace pqcached::kernels

#endif  // PQCACHED_KERNELS_ATTEND_ATTEND_SIMD_H_

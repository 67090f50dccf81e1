// Attention of a tile of queries over all rows, written once for every Vec.
//
// Queries are in the lanes of vectors: kLaneQueries of them form a *group*. Rows are processed in
// blocks, which are converted once for all groups. For each group a block takes three steps:
//
//   logits   [rows, lanes]: each element of a key, in all lanes, times the queries' elements
//   softmax  in each lane: no sums across lanes, and the causal mask is one comparison
//   values   [value_dim, lanes]: each element of a value, in all lanes, times the weights
//
// The first and the third step are the same product, of kTileRows x kTileVectors registers. During
// the work on a block the rows of the next one are prefetched.
//
// The parameter `Math` defines the products; RangeFma works for all dtypes. Include after one of
// simd_*.h; everything is local to the including file.
#ifndef PQCACHED_KERNELS_ATTEND_ATTEND_RANGE_SIMD_H_
#define PQCACHED_KERNELS_ATTEND_ATTEND_RANGE_SIMD_H_

#include <cstddef>
#include <cstdint>

#include "kernels/attend/attend_range_internal.h"
#include "kernels/attend/softmax_simd.h"

namespace pqcached::kernels {
namespace {

using internal::kMaxLaneQueries;
using internal::kMaxRangeBlockRows;
using internal::kRangeBlockRows;
using internal::RangeCall;

// Registers of one product: 24 sums of 32 registers in AVX-512, 12 of 16 elsewhere.
constexpr uint32_t kTileRows = Vec::kLanes == 16 ? 8 : 4;
constexpr uint32_t kTileVectors = 3;
constexpr uint32_t kLaneQueries = kTileVectors * Vec::kLanes;
static_assert(kMaxLaneQueries % kLaneQueries == 0 && kRangeBlockRows % 8 == 0);

// Scratch of one call. A *word* is 32 bits: a float, or a pair of bf16 numbers.
struct RangeWork {
  uint32_t group_count;
  uint32_t query_parts;  // summands of a query in the words of Math: 1 or 2
  float* queries;        // words [groups, parts, key_dim / kPair, kLaneQueries]
  float* sums;           // [groups, value_dim, kLaneQueries] weighted sums of values
  float* largest;        // [groups, kLaneQueries] largest logit so far
  float* weight_sum;     // [groups, kLaneQueries] sum of exp(logit - largest)
  float* norm_sum;       // [groups, kLaneQueries] sum of the weights as applied to the values
  float* rescale;        // [kLaneQueries] factor for the earlier sums, of the current group
  float* seen;           // [kLaneQueries] rows of the block that a query sees, less a half
  float* keys;           // words [block rows, key_dim / kPair]
  float* values;         // words [block rows / kPair, value_dim]
  float* logits;         // [block rows, kLaneQueries], then weights as Math packs them
};

// Rows of a block and their positions. Entries from `count` to the next multiple of eight repeat
// the last row.
struct RangeBlock {
  uint32_t count = 0;
  const std::byte* rows[kMaxRangeBlockRows];
  uint32_t positions[kMaxRangeBlockRows];

  uint32_t padded_count() const { return (count + 7) / 8 * 8; }
};

// Produces the rows up to position `last`, block by block.
struct RangeCursor {
  const RangeCall& call;
  uint32_t last;
  size_t span_index = 0;
  uint32_t next = 0;  // row of the current span

  void Fill(uint32_t block_rows, RangeBlock* block) {
    uint32_t count = 0;
    for (; count < block_rows && span_index < call.span_count; ++span_index, next = 0) {
      const RowSpan& span = call.spans[span_index];
      for (; next < span.token_count && count < block_rows; ++next, ++count) {
        if (span.first_position + next > last) {
          span_index = call.span_count;
          break;
        }
        block->rows[count] = span.rows + next * call.row_stride_bytes;
        block->positions[count] = span.first_position + next;
      }
      if (span_index == call.span_count || next < span.token_count) break;
    }
    block->count = count;
    for (uint32_t i = count; i < block->padded_count(); ++i)
      block->rows[i] = block->rows[count - 1];
  }
};

// Adds to sums[i][v] the products of `steps` words: broadcast[i * row_stride + k * step_stride], in
// all lanes, times vector v of lanes[k].
template <class Math>
PQC_INLINE void AddTile(const float* broadcast, size_t row_stride, size_t step_stride,
                        const float* lanes, uint32_t steps,
                        Vec::F (&sums)[kTileRows][kTileVectors]) {
  for (uint32_t k = 0; k < steps; ++k) {
    Vec::F vectors[kTileVectors];
#pragma GCC unroll 3
    for (uint32_t v = 0; v < kTileVectors; ++v) vectors[v] = Vec::Load(lanes + v * Vec::kLanes);
#pragma GCC unroll 8
    for (uint32_t i = 0; i < kTileRows; ++i) {
      const Vec::F element = Vec::Set(broadcast[i * row_stride]);
#pragma GCC unroll 3
      for (uint32_t v = 0; v < kTileVectors; ++v) {
        sums[i][v] = Math::AddProduct(element, vectors[v], sums[i][v]);
      }
    }
    broadcast += step_stride;
    lanes += kLaneQueries;
  }
}

// Products in fp32, for rows of any dtype.
template <DType kType>
struct RangeFma {
  static constexpr uint32_t kPair = 1;
  static constexpr uint32_t kRowElementBytes = kType == DType::kF32 ? 4 : 2;

  PQC_INLINE Vec::F AddProduct(Vec::F a, Vec::F b, Vec::F sum) { return Vec::MulAdd(a, b, sum); }

  static uint32_t QueryParts(const float*, size_t) { return 1; }
  static void PackQuery(const float* query, uint32_t key_dim, uint32_t, float* lane) {
    for (uint32_t i = 0; i < key_dim; ++i) lane[i * kLaneQueries] = query[i];
  }

  // May write up to Vec::kLanes words behind the row's.
  static void PackRow(const std::byte* row, uint32_t begin, uint32_t dim, float* to) {
    uint32_t i = 0;
    for (; i + Vec::kLanes <= dim; i += Vec::kLanes) {
      Vec::Store(to + i, Vec::LoadRow<kType>(row, begin + i));
    }
    if (i < dim) Vec::Store(to + i, Vec::LoadRowHalf<kType>(row, begin + i));
  }
  static void PackBlock(const RangeCall& call, const RangeBlock& block, const RangeWork& work) {
    for (uint32_t t = 0; t < block.padded_count(); ++t) {
      PackRow(block.rows[t], 0, call.key_dim, work.keys + t * call.key_dim);
    }
    for (uint32_t t = 0; t < block.padded_count(); ++t) {
      PackRow(block.rows[t], call.key_dim, call.value_dim, work.values + t * call.value_dim);
    }
  }

  // Replaces logits [rows, kLaneQueries] of one vector by exp(logit - base).
  PQC_INLINE void Weigh(float* logits, uint32_t rows, Vec::F base, Vec::F* sum, Vec::F* norm) {
    Vec::F total = Vec::Set(0.0f);
    for (uint32_t t = 0; t < rows; ++t, logits += kLaneQueries) {
      const Vec::F weight = Exp(Vec::Load(logits) - base);
      total += weight;
      Vec::Store(logits, weight);
    }
    *sum = *norm = total;
  }
};

// Scales, caps and masks the logits of a group, and converts them to weights.
template <class Math, bool kMasked>
void UpdateLanes(const RangeCall& call, const RangeWork& work, uint32_t group, uint32_t rows) {
  using F = Vec::F;
  const F scale = Vec::Set(call.scale);
  for (uint32_t at = 0; at < kLaneQueries; at += Vec::kLanes) {
    float* const state = work.largest + group * kLaneQueries + at;
    const F earlier = Vec::Load(state);
    const F seen = kMasked ? Vec::Load(work.seen + at) : Vec::Set(0.0f);
    F most = earlier;
    float* logit = work.logits + at;
    for (uint32_t t = 0; t < rows; ++t, logit += kLaneQueries) {
      F x = Vec::Load(logit) * scale;
      if (call.softcap > 0.0f) x = Softcap(x, call.softcap);
      x = Vec::Min(x, Vec::Set(kLargestFloat));
      // Plus or minus infinity: `seen` is never an integer.
      if (kMasked) x = Vec::Min(x, (seen - Vec::Set(static_cast<float>(t))) * Vec::Set(kInfinity));
      Vec::Store(logit, x);
      most = Vec::Max(x, most);
    }
    Vec::Store(state, most);
    const F base = Vec::Max(most, Vec::Set(-kLargestFloat));
    const F rescale = Exp(Vec::Max(earlier, Vec::Set(-kLargestFloat)) - base);
    Vec::Store(work.rescale + at, rescale);
    F sum, norm;
    Math::Weigh(work.logits + at, rows, base, &sum, &norm);
    float* const weight_sum = work.weight_sum + group * kLaneQueries + at;
    float* const norm_sum = work.norm_sum + group * kLaneQueries + at;
    Vec::Store(weight_sum, Vec::MulAdd(Vec::Load(weight_sum), rescale, sum));
    Vec::Store(norm_sum, Vec::MulAdd(Vec::Load(norm_sum), rescale, norm));
  }
}

// Computes logits [rows, kLaneQueries] of a group.
template <class Math>
void MultiplyKeys(const RangeCall& call, const RangeWork& work, uint32_t group, uint32_t rows) {
  const uint32_t words = call.key_dim / Math::kPair;
  const size_t part_words = size_t{words} * kLaneQueries;
  const float* queries = work.queries + group * work.query_parts * part_words;
  for (uint32_t t = 0; t < rows; t += kTileRows) {
    Vec::F sums[kTileRows][kTileVectors];
#pragma GCC unroll 8
    for (uint32_t i = 0; i < kTileRows; ++i) {
#pragma GCC unroll 3
      for (uint32_t v = 0; v < kTileVectors; ++v) sums[i][v] = Vec::Set(0.0f);
    }
    for (uint32_t part = 0; part < work.query_parts; ++part) {
      AddTile<Math>(work.keys + size_t{t} * words, words, 1, queries + part * part_words, words,
                    sums);
    }
#pragma GCC unroll 8
    for (uint32_t i = 0; i < kTileRows; ++i) {
#pragma GCC unroll 3
      for (uint32_t v = 0; v < kTileVectors; ++v) {
        Vec::Store(work.logits + (t + i) * kLaneQueries + v * Vec::kLanes, sums[i][v]);
      }
    }
  }
}

// Adds the weighted values of a block to the sums of a group.
template <class Math>
void MultiplyValues(const RangeCall& call, const RangeWork& work, uint32_t group, uint32_t rows) {
  float* to = work.sums + size_t{group} * call.value_dim * kLaneQueries;
  Vec::F rescale[kTileVectors];
#pragma GCC unroll 3
  for (uint32_t v = 0; v < kTileVectors; ++v) {
    rescale[v] = Vec::Load(work.rescale + v * Vec::kLanes);
  }
  for (uint32_t dim = 0; dim < call.value_dim; dim += kTileRows) {
    Vec::F sums[kTileRows][kTileVectors];
#pragma GCC unroll 8
    for (uint32_t i = 0; i < kTileRows; ++i) {
#pragma GCC unroll 3
      for (uint32_t v = 0; v < kTileVectors; ++v) {
        sums[i][v] = Vec::Load(to + i * kLaneQueries + v * Vec::kLanes) * rescale[v];
      }
    }
    AddTile<Math>(work.values + dim, 1, call.value_dim, work.logits, rows / Math::kPair, sums);
#pragma GCC unroll 8
    for (uint32_t i = 0; i < kTileRows; ++i) {
#pragma GCC unroll 3
      for (uint32_t v = 0; v < kTileVectors; ++v) {
        Vec::Store(to + i * kLaneQueries + v * Vec::kLanes, sums[i][v]);
      }
    }
    to += kTileRows * kLaneQueries;
  }
}

// Counts, for each query of a group, the rows of the block that it sees.
inline void CountSeen(const RangeCall& call, const RangeWork& work, uint32_t group,
                      const RangeBlock& block) {
  const uint32_t first_head = group * kLaneQueries;
  uint32_t token = first_head / call.group_size;
  uint32_t left = call.group_size - first_head % call.group_size;  // heads of this token
  uint32_t count = 0;
  for (uint32_t lane = 0; lane < kLaneQueries; ++lane, --left) {
    if (left == 0) {
      ++token;
      left = call.group_size;
    }
    while (count < block.count && block.positions[count] <= call.query_position + token) ++count;
    work.seen[lane] = static_cast<float>(count) - 0.5f;
  }
}

template <class Math>
void AttendGroup(const RangeCall& call, const RangeWork& work, uint32_t group,
                 const RangeBlock& block) {
  const uint32_t first_head = group * kLaneQueries;
  const uint32_t end_head =
      first_head + kLaneQueries < call.head_count ? first_head + kLaneQueries : call.head_count;
  const uint32_t first_limit = call.query_position + first_head / call.group_size;
  const uint32_t last_limit = call.query_position + (end_head - 1) / call.group_size;
  if (block.positions[0] > last_limit) return;
  const uint32_t rows = block.padded_count();
  MultiplyKeys<Math>(call, work, group, rows);
  if (block.count == rows && block.positions[rows - 1] <= first_limit) {
    UpdateLanes<Math, false>(call, work, group, rows);
  } else {
    CountSeen(call, work, group, block);
    UpdateLanes<Math, true>(call, work, group, rows);
  }
  MultiplyValues<Math>(call, work, group, rows);
}

// Prefetches share `part` of `parts` of a block.
inline void PrefetchPart(const RangeBlock& block, size_t row_bytes, uint32_t part, uint32_t parts) {
  for (uint32_t t = block.count * part / parts; t < block.count * (part + 1) / parts; ++t) {
    for (size_t i = 0; i < row_bytes; i += 64) Vec::Prefetch(block.rows[t] + i);
  }
}

template <class Math>
RangeWork PrepareWork(const RangeCall& call) {
  RangeWork work;
  work.group_count = (call.head_count + kLaneQueries - 1) / kLaneQueries;
  work.query_parts = Math::QueryParts(call.queries, size_t{call.head_count} * call.key_dim);
  float* next = reinterpret_cast<float*>(call.scratch);
  const auto take = [&next](size_t floats) {
    float* const begin = next;
    next += floats;
    return begin;
  };
  const size_t lanes = size_t{work.group_count} * kLaneQueries;
  work.queries = take(lanes * call.key_dim);
  work.sums = take(lanes * call.value_dim);
  work.largest = take(lanes);
  work.weight_sum = take(lanes);
  work.norm_sum = take(lanes);
  work.rescale = take(kLaneQueries);
  work.seen = take(kLaneQueries);
  work.keys = take(size_t{kRangeBlockRows} * call.key_dim);
  work.values = take(size_t{kRangeBlockRows} * call.value_dim);
  work.logits = next;
  for (size_t i = 0; i < lanes * call.key_dim; ++i) work.queries[i] = 0.0f;
  for (size_t i = 0; i < lanes * call.value_dim; ++i) work.sums[i] = 0.0f;
  for (size_t i = 0; i < lanes; ++i) {
    work.largest[i] = -kInfinity;
    work.weight_sum[i] = work.norm_sum[i] = 0.0f;
  }
  const size_t group_words = size_t{work.query_parts} * (call.key_dim / Math::kPair) * kLaneQueries;
  for (uint32_t head = 0; head < call.head_count; ++head) {
    Math::PackQuery(call.queries + size_t{head} * call.key_dim, call.key_dim, work.query_parts,
                    work.queries + head / kLaneQueries * group_words + head % kLaneQueries);
  }
  return work;
}

inline void FinishRange(const RangeCall& call, const RangeWork& work) {
  for (uint32_t head = 0; head < call.head_count; ++head) {
    const float weight_sum = work.weight_sum[head];
    const bool any = weight_sum > 0.0f;
    const float factor = any ? 1.0f / work.norm_sum[head] : 0.0f;
    const float* sums = work.sums + size_t{head / kLaneQueries} * call.value_dim * kLaneQueries +
                        head % kLaneQueries;
    float* output = call.output + size_t{head} * call.value_dim;
    for (uint32_t i = 0; i < call.value_dim; ++i) output[i] = sums[i * kLaneQueries] * factor;
    call.lse[head] = any ? work.largest[head] + __builtin_logf(weight_sum) : -kInfinity;
  }
}

template <class Math>
void AttendRangeWith(const RangeCall& call) {
  constexpr uint32_t kBlock = kRangeBlockRows * Math::kPair;
  const RangeWork work = PrepareWork<Math>(call);
  RangeCursor cursor{call, call.query_position + (call.head_count - 1) / call.group_size};
  RangeBlock blocks[2];
  cursor.Fill(kBlock, &blocks[0]);
  const size_t row_bytes = (call.key_dim + call.value_dim) * Math::kRowElementBytes;
  for (uint32_t current = 0; blocks[current].count > 0; current = 1 - current) {
    const RangeBlock& block = blocks[current];
    RangeBlock& ahead = blocks[1 - current];
    cursor.Fill(kBlock, &ahead);
    Math::PackBlock(call, block, work);
    for (uint32_t group = 0; group < work.group_count; ++group) {
      PrefetchPart(ahead, row_bytes, group, work.group_count);
      AttendGroup<Math>(call, work, group, block);
    }
  }
  FinishRange(call, work);
}

inline void AttendRangeByType(const RangeCall& call) {
  switch (call.dtype) {
    case DType::kF16:
      return AttendRangeWith<RangeFma<DType::kF16>>(call);
    case DType::kBf16:
      return AttendRangeWith<RangeFma<DType::kBf16>>(call);
    case DType::kF32:
      return AttendRangeWith<RangeFma<DType::kF32>>(call);
  }
}

}  // namespace
}  // namespace pqcached::kernels

#endif  // PQCACHED_KERNELS_ATTEND_ATTEND_RANGE_SIMD_H_

// Lists of tokens by the scores of a group of heads in NEON. One load reads the entries of all
// heads for one code; for tables of 256 entries this is faster than register permutes head by head.
#include <arm_neon.h>

#include "kernels/base/simd/compress_neon.h"
#include "kernels/base/simd/simd_neon.h"
#include "kernels/select/scan/pq_rough.h"
#include "kernels/select/scan/pq_rough_lane_codes.h"
#include "kernels/select/scan/pq_rough_lists_simd.h"

namespace pqcached::kernels {
namespace {

struct Lanes4 {
  using Vector = float32x4_t;
  static constexpr uint32_t kCount = 4;
  static Vector Load(const float* at) { return vld1q_f32(at); }
  static void Store(float* at, Vector x) { vst1q_f32(at, x); }
  static Vector Larger(Vector a, Vector b) { return vmaxq_f32(a, b); }
  static float32x4_t Sum(Vector x) { return x; }
  static float32x4_t Largest(Vector x) { return x; }
};

// Twice as many lanes in two vectors; the members are those of `Half`, which also needs Larger, the
// larger of two vectors lane by lane.
template <typename Half>
struct TwiceLanes {
  struct Vector {
    typename Half::Vector low;
    typename Half::Vector high;

    friend Vector operator+(Vector a, Vector b) { return {a.low + b.low, a.high + b.high}; }
    friend Vector operator*(Vector a, Vector b) { return {a.low * b.low, a.high * b.high}; }
    Vector& operator+=(Vector b) { return *this = *this + b; }
  };
  static constexpr uint32_t kCount = 2 * Half::kCount;
  static Vector Load(const float* at) { return {Half::Load(at), Half::Load(at + Half::kCount)}; }
  static void Store(float* at, Vector x) {
    Half::Store(at, x.low);
    Half::Store(at + Half::kCount, x.high);
  }
  static Vector Larger(Vector a, Vector b) {
    return {Half::Larger(a.low, b.low), Half::Larger(a.high, b.high)};
  }
  static auto Sum(Vector x) { return Half::Sum(x.low + x.high); }
  static auto Largest(Vector x) { return Half::Largest(Half::Larger(x.low, x.high)); }
};

using Lanes8 = TwiceLanes<Lanes4>;
using Lanes16 = TwiceLanes<Lanes8>;

// Returns byte i of the word times kFactor. One instruction extracts the byte, and loads of four
// floats multiply it.
template <uint32_t kFactor>
inline uint64_t ByteTimes(uint64_t word, uint32_t i) {
  return (word >> (8 * i) & 255u) * kFactor;
}

// Return the sum, or the largest, of each vector's floats.
inline float32x4_t JoinSums(float32x4_t a, float32x4_t b, float32x4_t c, float32x4_t d) {
  return vpaddq_f32(vpaddq_f32(a, b), vpaddq_f32(c, d));
}
inline float32x4_t JoinLargest(float32x4_t a, float32x4_t b, float32x4_t c, float32x4_t d) {
  return vpmaxq_f32(vpmaxq_f32(a, b), vpmaxq_f32(c, d));
}

// Stores one number for each of four tokens: the rule applied over its lanes.
template <typename Lanes, LaneRule kRule>
inline void StoreJoined(const typename Lanes::Vector* tokens, float* scores) {
  if constexpr (kRule == LaneRule::kSumOfProducts) {
    vst1q_f32(scores, JoinSums(Lanes::Sum(tokens[0]), Lanes::Sum(tokens[1]), Lanes::Sum(tokens[2]),
                               Lanes::Sum(tokens[3])));
  } else {
    vst1q_f32(scores, JoinLargest(Lanes::Largest(tokens[0]), Lanes::Largest(tokens[1]),
                                  Lanes::Largest(tokens[2]), Lanes::Largest(tokens[3])));
  }
}

// Codes of a block, one byte each: planes[j] for sub-space j.
struct BlockCodes {
  const uint8_t* planes[kMaxSubspaces];
};

// Scores up to kTokensPerTile tokens from `slot` on; the codes of missing tokens count as zero.
// kSubspaces is the number of sub-spaces, or 0 for any number; fixing it at four removes a loop and
// saves a quarter of the time.
template <typename Lanes, LaneRule kRule, uint32_t kSubspaces>
inline void ScoreTokenTile(const RoughSlots& slots, const LaneTables& tables,
                           const BlockCodes& codes, uint32_t slot, uint32_t count,
                           typename Lanes::Vector* tokens) {
  const size_t table_floats = size_t{Lanes::kCount} << slots.bits;
  const float* entries = tables.entries;
  const auto find = [](const float* table, uint64_t word, uint32_t i) {
    return Lanes::Load(table + ByteTimes<Lanes::kCount>(word, i));
  };
  if constexpr (kSubspaces == 4) {
    uint64_t words[4];
    for (uint32_t j = 0; j < 4; ++j) words[j] = LoadCodes(codes.planes[j] + slot, count);
#pragma GCC unroll 8
    for (uint32_t i = 0; i < kTokensPerTile; ++i) {
      auto token = find(entries, words[0], i);
      token = Combine<kRule>(token, find(entries + table_floats, words[1], i));
      token = Combine<kRule>(token, find(entries + 2 * table_floats, words[2], i));
      tokens[i] = Combine<kRule>(token, find(entries + 3 * table_floats, words[3], i));
    }
    return;
  }
  const uint64_t first = LoadCodes(codes.planes[0] + slot, count);
#pragma GCC unroll 8
  for (uint32_t i = 0; i < kTokensPerTile; ++i) tokens[i] = find(entries, first, i);
  for (uint32_t subspace = 1; subspace < slots.subspace_count; ++subspace) {
    entries += table_floats;
    const uint64_t word = LoadCodes(codes.planes[subspace] + slot, count);
#pragma GCC unroll 8
    for (uint32_t i = 0; i < kTokensPerTile; ++i) {
      tokens[i] = Combine<kRule>(tokens[i], find(entries, word, i));
    }
  }
}

template <typename Lanes, LaneRule kRule, uint32_t kSubspaces>
void List(const RoughSlots& slots, const LaneTables& tables, float least, double* lane_sums,
          RoughList& list) {
  using Vector = typename Lanes::Vector;
  alignas(64) uint8_t bytes[kMaxSubspaces][kBlockSlots];
  alignas(64) float scores[kBlockSlots];
  BlockCodes codes;
  for (uint32_t begin = 0; begin < slots.slot_count; begin += kBlockSlots) {
    const uint32_t rest = slots.slot_count - begin;
    const uint32_t count = rest < kBlockSlots ? rest : kBlockSlots;
    if (slots.nibble_planes) SplitNibbles(slots, begin, count, bytes);
    for (uint32_t j = 0; j < slots.subspace_count; ++j) {
      codes.planes[j] =
          slots.nibble_planes ? bytes[j] : slots.planes + j * slots.plane_stride + begin;
    }
    Vector sum = {};
    uint32_t slot = 0;
    for (; slot + kTokensPerTile <= count; slot += kTokensPerTile) {
      Vector tokens[kTokensPerTile];
      ScoreTokenTile<Lanes, kRule, kSubspaces>(slots, tables, codes, slot, kTokensPerTile, tokens);
      if (kRule != LaneRule::kMaxOfSums) {
        sum += ((tokens[0] + tokens[1]) + (tokens[2] + tokens[3])) +
               ((tokens[4] + tokens[5]) + (tokens[6] + tokens[7]));
      }
      StoreJoined<Lanes, kRule>(tokens, scores + slot);
      StoreJoined<Lanes, kRule>(tokens + 4, scores + slot + 4);
    }
    if (slot < count) {
      Vector tokens[kTokensPerTile];
      ScoreTokenTile<Lanes, kRule, kSubspaces>(slots, tables, codes, slot, count - slot, tokens);
      for (uint32_t i = 0; i < count - slot; ++i) sum += tokens[i];
      StoreJoined<Lanes, kRule>(tokens, scores + slot);
      StoreJoined<Lanes, kRule>(tokens + 4, scores + slot + 4);
    }
    if (kRule != LaneRule::kMaxOfSums) {
      float sums[Lanes::kCount];
      Lanes::Store(sums, sum);
      for (uint32_t i = 0; i < Lanes::kCount; ++i) lane_sums[i] += static_cast<double>(sums[i]);
    }
    AppendScores(scores, count, slots.first_position + begin, least, list);
  }
}

template <typename Lanes, LaneRule kRule>
void ListByCount(const RoughSlots& slots, const LaneTables& tables, float least, double* lane_sums,
                 RoughList& list) {
  if (slots.subspace_count == 4) {
    List<Lanes, kRule, 4>(slots, tables, least, lane_sums, list);
  } else {
    List<Lanes, kRule, 0>(slots, tables, least, lane_sums, list);
  }
}

template <typename Lanes>
void ListByRule(const RoughSlots& slots, const LaneTables& tables, float least, double* lane_sums,
                RoughList& list) {
  switch (tables.rule) {
    case LaneRule::kSumOfProducts:
      return ListByCount<Lanes, LaneRule::kSumOfProducts>(slots, tables, least, lane_sums, list);
    case LaneRule::kMaxOfProducts:
      return ListByCount<Lanes, LaneRule::kMaxOfProducts>(slots, tables, least, lane_sums, list);
    case LaneRule::kMaxOfSums:
      return ListByCount<Lanes, LaneRule::kMaxOfSums>(slots, tables, least, lane_sums, list);
  }
}

// Stores four rows of four floats as four columns, `stride` floats apart.
inline void StoreTransposed(const float32x4_t* rows, size_t stride, float* to) {
  const float32x4_t even_low = vzip1q_f32(rows[0], rows[2]);
  const float32x4_t even_high = vzip2q_f32(rows[0], rows[2]);
  const float32x4_t odd_low = vzip1q_f32(rows[1], rows[3]);
  const float32x4_t odd_high = vzip2q_f32(rows[1], rows[3]);
  vst1q_f32(to, vzip1q_f32(even_low, odd_low));
  vst1q_f32(to + stride, vzip2q_f32(even_low, odd_low));
  vst1q_f32(to + 2 * stride, vzip1q_f32(even_high, odd_high));
  vst1q_f32(to + 3 * stride, vzip2q_f32(even_high, odd_high));
}

}  // namespace

void InterleaveLanes(const float* rows, size_t row_stride, uint32_t head_count, uint32_t count,
                     uint32_t lanes, float* to) {
  constexpr uint32_t kHeads = 4;
  for (uint32_t lane = 0; lane < lanes; lane += kHeads) {
    for (uint32_t c = 0; c < count; c += kHeads) {
      float32x4_t x[kHeads];
      for (uint32_t i = 0; i < kHeads; ++i) {
        x[i] = lane + i < head_count ? vld1q_f32(rows + (lane + i) * row_stride + c)
                                     : vdupq_n_f32(0.0f);
      }
      StoreTransposed(x, lanes, to + size_t{c} * lanes + lane);
    }
  }
}

void ListLanes(const RoughSlots& slots, const LaneTables& tables, float least, double* lane_sums,
               RoughList& list) {
  if (tables.lanes == 4) return ListByRule<Lanes4>(slots, tables, least, lane_sums, list);
  if (tables.lanes == 8) return ListByRule<Lanes8>(slots, tables, least, lane_sums, list);
  ListByRule<Lanes16>(slots, tables, least, lane_sums, list);
}

BandCount ListLaneBand(const float* scores, uint32_t count, float low, float high,
                       uint32_t* indices) {
  return ListBand(scores, count, low, high, indices);
}

void TakeLanesAbove(const RoughList& list, float bound, uint32_t* positions, uint32_t capacity) {
  TakeAbove(list, bound, positions, capacity);
}

}  // namespace pqcached::kernels

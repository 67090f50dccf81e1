// Scores of a group of heads, token by token, written once for all instruction sets. One load reads
// the entries of all heads for one code; for tables of 256 entries this is faster than register
// permutes head by head.
//
// The parameter `Machine` has, for one instruction set, Lanes4, Lanes8 and Lanes16, `Four` (a
// vector of four floats), and
//   template <uint32_t kFactor>
//   static uint64_t ByteTimes(uint64_t word, uint32_t i);  // byte i of the word times kFactor
//   static void Store(float* at, Four x);                  // aligned
//   static Four JoinSums(Four a, Four b, Four c, Four d);     // the sum of each vector's floats
//   static Four JoinLargest(Four a, Four b, Four c, Four d);  // the largest of these
//   static void Append(const float* scores, uint32_t count, uint32_t first_position, float least,
//                      RoughList& list);
// which appends the tokens whose score is `least` or more; scores are readable up to a multiple of
// 16. Lanes have Load (aligned), Store, and Sum and Largest, which join all lanes to four. Include
// only in instruction-set files; the anonymous namespace keeps every copy local to its file.
#ifndef PQCACHED_KERNELS_SELECT_SCAN_PQ_ROUGH_LANES_SIMD_H_
#define PQCACHED_KERNELS_SELECT_SCAN_PQ_ROUGH_LANES_SIMD_H_

#include "kernels/select/scan/pq_rough.h"

namespace pqcached::kernels {
namespace {

constexpr uint32_t kBlockSlots = 1024;
constexpr uint32_t kTokensPerTile = 8;  // tokens whose products are in registers at the same time
constexpr uint32_t kMaxSubspaces = 16;

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

// Stores one number for each of four tokens: the rule applied over its lanes.
template <typename Machine, typename Lanes, LaneRule kRule>
inline void StoreJoined(const typename Lanes::Vector* tokens, float* scores) {
  if constexpr (kRule == LaneRule::kSumOfProducts) {
    Machine::Store(scores, Machine::JoinSums(Lanes::Sum(tokens[0]), Lanes::Sum(tokens[1]),
                                             Lanes::Sum(tokens[2]), Lanes::Sum(tokens[3])));
  } else {
    Machine::Store(scores,
                   Machine::JoinLargest(Lanes::Largest(tokens[0]), Lanes::Largest(tokens[1]),
                                        Lanes::Largest(tokens[2]), Lanes::Largest(tokens[3])));
  }
}

// Codes of a block, one byte each: planes[j] for sub-space j.
struct BlockCodes {
  const uint8_t* planes[kMaxSubspaces];
};

inline uint64_t LoadCodes(const uint8_t* plane, uint32_t count) {
  uint64_t word = 0;
  if (count == kTokensPerTile) {
    __builtin_memcpy(&word, plane, kTokensPerTile);
  } else {
    __builtin_memcpy(&word, plane, count);
  }
  return word;
}

template <LaneRule kRule, typename Vector>
inline Vector Combine(Vector a, Vector b) {
  return kRule == LaneRule::kMaxOfSums ? a + b : a * b;
}

// Scores up to kTokensPerTile tokens from `slot` on; the codes of missing tokens count as zero.
// kSubspaces is the number of sub-spaces, or 0 for any number; fixing it at four removes a loop and
// saves a quarter of the time.
template <typename Machine, typename Lanes, LaneRule kRule, uint32_t kSubspaces>
inline void ScoreTokenTile(const RoughSlots& slots, const LaneTables& tables,
                           const BlockCodes& codes, uint32_t slot, uint32_t count,
                           typename Lanes::Vector* tokens) {
  const size_t table_floats = size_t{Lanes::kCount} << slots.bits;
  const float* entries = tables.entries;
  const auto find = [](const float* table, uint64_t word, uint32_t i) {
    return Lanes::Load(table + Machine::template ByteTimes<Lanes::kCount>(word, i));
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

// Expands nibbles to one byte per code.
void SplitNibbles(const RoughSlots& slots, uint32_t begin, uint32_t count,
                  uint8_t (*bytes)[kBlockSlots]) {
  for (uint32_t subspace = 0; subspace < slots.subspace_count; subspace += 2) {
    const uint8_t* plane = slots.planes + subspace / 2 * slots.plane_stride + begin;
    for (uint32_t i = 0; i < count; ++i) {
      bytes[subspace][i] = plane[i] & 15u;
      bytes[subspace + 1][i] = static_cast<uint8_t>(plane[i] >> 4u);
    }
  }
}

template <typename Machine, typename Lanes, LaneRule kRule, uint32_t kSubspaces>
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
      ScoreTokenTile<Machine, Lanes, kRule, kSubspaces>(slots, tables, codes, slot, kTokensPerTile,
                                                        tokens);
      if (kRule != LaneRule::kMaxOfSums) {
        sum += ((tokens[0] + tokens[1]) + (tokens[2] + tokens[3])) +
               ((tokens[4] + tokens[5]) + (tokens[6] + tokens[7]));
      }
      StoreJoined<Machine, Lanes, kRule>(tokens, scores + slot);
      StoreJoined<Machine, Lanes, kRule>(tokens + 4, scores + slot + 4);
    }
    if (slot < count) {
      Vector tokens[kTokensPerTile];
      ScoreTokenTile<Machine, Lanes, kRule, kSubspaces>(slots, tables, codes, slot, count - slot,
                                                        tokens);
      for (uint32_t i = 0; i < count - slot; ++i) sum += tokens[i];
      StoreJoined<Machine, Lanes, kRule>(tokens, scores + slot);
      StoreJoined<Machine, Lanes, kRule>(tokens + 4, scores + slot + 4);
    }
    if (kRule != LaneRule::kMaxOfSums) {
      float sums[Lanes::kCount];
      Lanes::Store(sums, sum);
      for (uint32_t i = 0; i < Lanes::kCount; ++i) lane_sums[i] += static_cast<double>(sums[i]);
    }
    Machine::Append(scores, count, slots.first_position + begin, least, list);
  }
}

template <typename Machine, typename Lanes, LaneRule kRule>
void ListByCount(const RoughSlots& slots, const LaneTables& tables, float least, double* lane_sums,
                 RoughList& list) {
  if (slots.subspace_count == 4) {
    List<Machine, Lanes, kRule, 4>(slots, tables, least, lane_sums, list);
  } else {
    List<Machine, Lanes, kRule, 0>(slots, tables, least, lane_sums, list);
  }
}

template <typename Machine, typename Lanes>
void ListByRule(const RoughSlots& slots, const LaneTables& tables, float least, double* lane_sums,
                RoughList& list) {
  switch (tables.rule) {
    case LaneRule::kSumOfProducts:
      return ListByCount<Machine, Lanes, LaneRule::kSumOfProducts>(slots, tables, least, lane_sums,
                                                                   list);
    case LaneRule::kMaxOfProducts:
      return ListByCount<Machine, Lanes, LaneRule::kMaxOfProducts>(slots, tables, least, lane_sums,
                                                                   list);
    case LaneRule::kMaxOfSums:
      return ListByCount<Machine, Lanes, LaneRule::kMaxOfSums>(slots, tables, least, lane_sums,
                                                               list);
  }
}

// Implements LaneOps::list.
template <typename Machine>
void ListByLanes(const RoughSlots& slots, const LaneTables& tables, float least, double* lane_sums,
                 RoughList& list) {
  if (tables.lanes == 4) {
    return ListByRule<Machine, typename Machine::Lanes4>(slots, tables, least, lane_sums, list);
  }
  if (tables.lanes == 8) {
    return ListByRule<Machine, typename Machine::Lanes8>(slots, tables, least, lane_sums, list);
  }
  ListByRule<Machine, typename Machine::Lanes16>(slots, tables, least, lane_sums, list);
}

}  // namespace
}  // namespace pqcached::kernels

#endif  // PQCACHED_KERNELS_SELECT_SCAN_PQ_ROUGH_LANES_SIMD_H_

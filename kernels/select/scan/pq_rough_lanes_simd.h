// Scores of a group of heads, token by token, written once for all instruction sets of x86. One
// load reads the entries of all heads for one code; for tables of 256 entries this is faster than
// register permutes head by head.
//
// The parameter `Machine` has, for one instruction set, Lanes16 (with the members of Lanes8) and
//   static void Append(const float* scores, uint32_t count, uint32_t first_position, float least,
//                      RoughList& list);
// which appends the tokens whose score is `least` or more; scores are readable up to a multiple of
// 16. Include only in the instruction-set files of x86; the anonymous namespace keeps every copy
// local to its file.
#ifndef PQCACHED_KERNELS_SELECT_SCAN_PQ_ROUGH_LANES_SIMD_H_
#define PQCACHED_KERNELS_SELECT_SCAN_PQ_ROUGH_LANES_SIMD_H_

#include <immintrin.h>

#include "kernels/select/scan/pq_rough.h"

namespace pqcached::kernels {
namespace {

constexpr uint32_t kBlockSlots = 1024;
constexpr uint32_t kTokensPerTile = 8;  // tokens whose products are in registers at the same time
constexpr uint32_t kMaxSubspaces = 16;

struct Lanes4 {
  using Vector = __m128;
  static constexpr uint32_t kCount = 4;
  static Vector Load(const float* at) { return _mm_load_ps(at); }
  static void Store(float* at, Vector x) { _mm_storeu_ps(at, x); }
  static __m128 Sum(Vector x) { return x; }
  static __m128 Largest(Vector x) { return x; }
};

struct Lanes8 {
  using Vector = __m256;
  static constexpr uint32_t kCount = 8;
  static Vector Load(const float* at) { return _mm256_load_ps(at); }
  static void Store(float* at, Vector x) { _mm256_storeu_ps(at, x); }
  static __m128 Sum(Vector x) {
    return _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  }
  static __m128 Largest(Vector x) {
    return _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  }
};

template <LaneRule kRule>
inline __m128 Join(__m128 a, __m128 b) {
  return kRule == LaneRule::kSumOfProducts ? _mm_add_ps(a, b) : _mm_max_ps(a, b);
}

// Returns one number for each of four tokens: the rule applied over its lanes.
template <typename Lanes, LaneRule kRule>
inline __m128 JoinLanes(const typename Lanes::Vector* tokens) {
  __m128 x[4];
  for (uint32_t i = 0; i < 4; ++i) {
    x[i] = kRule == LaneRule::kSumOfProducts ? Lanes::Sum(tokens[i]) : Lanes::Largest(tokens[i]);
  }
  const __m128 pair_0 = Join<kRule>(_mm_unpacklo_ps(x[0], x[1]), _mm_unpackhi_ps(x[0], x[1]));
  const __m128 pair_1 = Join<kRule>(_mm_unpacklo_ps(x[2], x[3]), _mm_unpackhi_ps(x[2], x[3]));
  return Join<kRule>(_mm_movelh_ps(pair_0, pair_1), _mm_movehl_ps(pair_1, pair_0));
}

// Codes of a block, one byte each: planes[j] for sub-space j.
struct BlockCodes {
  const uint8_t* planes[kMaxSubspaces];
};

// Returns byte i of the word times kFactor. A rotation, unlike a shift, needs no copy of the word.
template <uint32_t kFactor>
inline uint64_t ByteTimes(uint64_t word, uint32_t i) {
  constexpr uint32_t kShift = kFactor == 4   ? 4
                              : kFactor == 8 ? 5
                                             : 6;  // log2 of kFactor floats in bytes
  const uint32_t right = (8 * i + 64 - kShift) % 64;
  return ((word >> right | word << ((64 - right) % 64)) & (255u << kShift)) / 4;
}

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
      ScoreTokenTile<Lanes, kRule, kSubspaces>(slots, tables, codes, slot, kTokensPerTile, tokens);
      if (kRule != LaneRule::kMaxOfSums) {
        sum += ((tokens[0] + tokens[1]) + (tokens[2] + tokens[3])) +
               ((tokens[4] + tokens[5]) + (tokens[6] + tokens[7]));
      }
      _mm_store_ps(scores + slot, JoinLanes<Lanes, kRule>(tokens));
      _mm_store_ps(scores + slot + 4, JoinLanes<Lanes, kRule>(tokens + 4));
    }
    if (slot < count) {
      Vector tokens[kTokensPerTile];
      ScoreTokenTile<Lanes, kRule, kSubspaces>(slots, tables, codes, slot, count - slot, tokens);
      for (uint32_t i = 0; i < count - slot; ++i) sum += tokens[i];
      _mm_store_ps(scores + slot, JoinLanes<Lanes, kRule>(tokens));
      _mm_store_ps(scores + slot + 4, JoinLanes<Lanes, kRule>(tokens + 4));
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
  if (tables.lanes == 4) return ListByRule<Machine, Lanes4>(slots, tables, least, lane_sums, list);
  if (tables.lanes == 8) return ListByRule<Machine, Lanes8>(slots, tables, least, lane_sums, list);
  ListByRule<Machine, typename Machine::Lanes16>(slots, tables, least, lane_sums, list);
}

}  // namespace
}  // namespace pqcached::kernels

#endif  // PQCACHED_KERNELS_SELECT_SCAN_PQ_ROUGH_LANES_SIMD_H_

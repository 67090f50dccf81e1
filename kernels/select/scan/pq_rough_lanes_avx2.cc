// Lists of tokens by the scores of a group of heads. One load reads the entries of all heads for
// one code; for tables of 256 entries this is faster than register permutes head by head.
//
// For 4 x 256 entries a token takes 0.8 ns (EPYC Zen 4, 3.7 GHz, 2026-11-28), 2.8 cycles, of which
// its four loads and their addresses need 2.6. Wider registers, and AVX-512, would not help.
#include <immintrin.h>

#include "kernels/base/simd/compress_avx2.h"
#include "kernels/base/simd/simd_avx2.h"
#include "kernels/select/scan/pq_rough.h"
#include "kernels/select/scan/pq_rough_lane_codes.h"
#include "kernels/select/scan/pq_rough_lists_simd.h"

namespace pqcached::kernels {
namespace {

constexpr uint32_t kListStep = 64;  // tokens that are compared at the same time

template <LaneRule kRule>
inline __m256 Join(__m256 a, __m256 b) {
  return kRule == LaneRule::kSumOfProducts ? _mm256_add_ps(a, b) : _mm256_max_ps(a, b);
}

// The numbers of all heads for one token. TileSum returns the sums of a tile's tokens, lane by
// lane; Quads returns four lanes of each of two tokens, after joining the others with them.
struct Lanes4 {
  using Vector = __m128;
  static constexpr uint32_t kCount = 4;
  static Vector Load(const float* at) { return _mm_load_ps(at); }

  template <LaneRule>
  static __m256 Quads(Vector a, Vector b) {
    return _mm256_insertf128_ps(_mm256_castps128_ps256(a), b, 1);
  }

  // Lane i + 4 belongs to the same head as lane i.
  using Sum = __m256;
  static Sum TileSum(const Vector* x) {
    constexpr LaneRule kAny = LaneRule::kSumOfProducts;
    return (Quads<kAny>(x[0], x[4]) + Quads<kAny>(x[1], x[5])) +
           (Quads<kAny>(x[2], x[6]) + Quads<kAny>(x[3], x[7]));
  }
};

struct Lanes8 {
  using Vector = __m256;
  static constexpr uint32_t kCount = 8;
  static Vector Load(const float* at) { return _mm256_load_ps(at); }

  template <LaneRule kRule>
  static __m256 Quads(Vector a, Vector b) {
    return Join<kRule>(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
  }

  using Sum = Vector;
  static Sum TileSum(const Vector* x) {
    return ((x[0] + x[1]) + (x[2] + x[3])) + ((x[4] + x[5]) + (x[6] + x[7]));
  }
};

struct Lanes16 {
  // Sixteen floats in two registers.
  struct Vector {
    __m256 low;
    __m256 high;

    friend Vector operator+(Vector a, Vector b) { return {a.low + b.low, a.high + b.high}; }
    friend Vector operator*(Vector a, Vector b) { return {a.low * b.low, a.high * b.high}; }
    Vector& operator+=(Vector b) { return *this = *this + b; }
  };
  static constexpr uint32_t kCount = 16;
  static Vector Load(const float* at) { return {_mm256_load_ps(at), _mm256_load_ps(at + 8)}; }

  template <LaneRule kRule>
  static __m256 Quads(Vector a, Vector b) {
    return Lanes8::Quads<kRule>(Join<kRule>(a.low, a.high), Join<kRule>(b.low, b.high));
  }

  using Sum = Vector;
  static Sum TileSum(const Vector* x) {
    return ((x[0] + x[1]) + (x[2] + x[3])) + ((x[4] + x[5]) + (x[6] + x[7]));
  }
};

// Returns one number for each token of a tile: the rule applied over its lanes.
template <typename Lanes, LaneRule kRule>
inline __m256 JoinLanes(const typename Lanes::Vector* tokens) {
  __m256 x[4];
  for (uint32_t i = 0; i < 4; ++i) x[i] = Lanes::template Quads<kRule>(tokens[i], tokens[i + 4]);
  const __m256 pair_0 = Join<kRule>(_mm256_unpacklo_ps(x[0], x[1]), _mm256_unpackhi_ps(x[0], x[1]));
  const __m256 pair_1 = Join<kRule>(_mm256_unpacklo_ps(x[2], x[3]), _mm256_unpackhi_ps(x[2], x[3]));
  const __m256d a = _mm256_castps_pd(pair_0);
  const __m256d b = _mm256_castps_pd(pair_1);
  return Join<kRule>(_mm256_castpd_ps(_mm256_unpacklo_pd(a, b)),
                     _mm256_castpd_ps(_mm256_unpackhi_pd(a, b)));
}

// Codes of a block, one byte each: planes[j] for sub-space j.
struct BlockCodes {
  const uint8_t* planes[kMaxSubspaces];
  const uint16_t* offsets;  // of the first sub-space's entries, in bytes; for 4 x 256 entries only
};

template <typename Lanes>
constexpr uint32_t kOffsetShift = Lanes::kCount == 4   ? 4
                                  : Lanes::kCount == 8 ? 5
                                                       : 6;

template <typename Lanes>
inline typename Lanes::Vector LoadAt(const float* table, uint64_t offset) {
  return Lanes::Load(
      reinterpret_cast<const float*>(reinterpret_cast<const uint8_t*>(table) + offset));
}

// Returns the entry for byte i of the word. A rotation, unlike a shift, needs no copy of the word.
template <typename Lanes>
inline typename Lanes::Vector Find(const float* table, uint64_t word, uint32_t i) {
  constexpr uint32_t kShift = kOffsetShift<Lanes>;
  const uint32_t right = (8 * i + 64 - kShift) % 64;
  return LoadAt<Lanes>(table, (word >> right | word << ((64 - right) % 64)) & (255u << kShift));
}

// Scores up to kTokensPerTile tokens from `slot` on; the codes of missing tokens count as zero.
// k4x256: there are four sub-spaces of 256 entries. Known distances between tables, and no loop,
// save a fifth of the time. Offsets of one of the four sub-spaces are loaded rather than computed,
// because processors load and rotate with different units.
template <typename Lanes, LaneRule kRule, bool k4x256>
inline void ScoreTile(const RoughSlots& slots, const LaneTables& tables, const BlockCodes& codes,
                      uint32_t slot, uint32_t count, typename Lanes::Vector* tokens) {
  if constexpr (k4x256) {
    constexpr uint32_t kTableFloats = Lanes::kCount * 256;
    const float* const entries = tables.entries;
    const uint16_t* const offsets = codes.offsets + slot;
    uint64_t words[4];
    for (uint32_t j = 1; j < 4; ++j) words[j] = LoadCodes(codes.planes[j] + slot, count);
#pragma GCC unroll 8
    for (uint32_t i = 0; i < kTokensPerTile; ++i) {
      auto token = LoadAt<Lanes>(entries, offsets[i]);
      token = Combine<kRule>(token, Find<Lanes>(entries + kTableFloats, words[1], i));
      token = Combine<kRule>(token, Find<Lanes>(entries + 2 * kTableFloats, words[2], i));
      tokens[i] = Combine<kRule>(token, Find<Lanes>(entries + 3 * kTableFloats, words[3], i));
    }
  } else {
    const float* entries = tables.entries;
    const uint64_t first = LoadCodes(codes.planes[0] + slot, count);
#pragma GCC unroll 8
    for (uint32_t i = 0; i < kTokensPerTile; ++i) tokens[i] = Find<Lanes>(entries, first, i);
    for (uint32_t subspace = 1; subspace < slots.subspace_count; ++subspace) {
      entries += size_t{Lanes::kCount} << slots.bits;
      const uint64_t word = LoadCodes(codes.planes[subspace] + slot, count);
#pragma GCC unroll 8
      for (uint32_t i = 0; i < kTokensPerTile; ++i) {
        tokens[i] = Combine<kRule>(tokens[i], Find<Lanes>(entries, word, i));
      }
    }
  }
}

// Sets offsets[i] = codes[i] << shift, and zeros up to the next multiple of 16.
inline void FillOffsets(const uint8_t* codes, uint32_t count, uint32_t shift, uint16_t* offsets) {
  constexpr uint32_t kStep = 16;
  const auto fill = [shift](const uint8_t* from, uint16_t* to) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    const __m128i bits = _mm_cvtsi32_si128(static_cast<int>(shift));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to),
                        _mm256_sll_epi16(_mm256_cvtepu8_epi16(bytes), bits));
  };
  const uint32_t whole = count / kStep * kStep;
  for (uint32_t i = 0; i < whole; i += kStep) fill(codes + i, offsets + i);
  if (whole == count) return;
  uint8_t rest[kStep] = {};
  __builtin_memcpy(rest, codes + whole, count - whole);
  fill(rest, offsets + whole);
}

// Returns the scores, among 32, that are at least `bound` as bits.
inline uint32_t AtLeastBits(const float* scores, __m256 bound) {
  const auto compare = [&](uint32_t i) {
    return _mm256_castps_si256(
        _mm256_cmp_ps(bound, _mm256_load_ps(scores + i * kLanes), _CMP_LE_OQ));
  };
  // Packing leaves groups of four tokens in the order 0 2 4 6 1 3 5 7.
  const __m256i packed = _mm256_packs_epi16(_mm256_packs_epi32(compare(0), compare(1)),
                                            _mm256_packs_epi32(compare(2), compare(3)));
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  return static_cast<uint32_t>(_mm256_movemask_epi8(_mm256_permutevar8x32_epi32(packed, order)));
}

// Returns the same for kListStep tokens, of which `count` exist.
inline uint64_t ListedBits(const float* scores, uint32_t count, __m256 bound) {
  const uint64_t bits = AtLeastBits(scores, bound) |
                        uint64_t{AtLeastBits(scores + kListStep / 2, bound)} << (kListStep / 2);
  return count >= kListStep ? bits : bits & ((uint64_t{1} << count) - 1);
}

// Lists tokens of a block when few are listed. Their number among kListStep is unpredictable, so
// kUsual indices are written, valid or not, and then those that are left.
void ListFew(const float* scores, uint32_t count, float least, uint32_t first_position,
             RoughList& list) {
  constexpr uint32_t kUsual = 4;
  const __m256 bound = _mm256_set1_ps(least);
  // Local copies: the compiler must assume that a store could change the originals.
  uint32_t* const positions = list.positions;
  float* const listed = list.scores;
  uint32_t written = list.count;
  for (uint32_t i = 0; i < count; i += kListStep) {
    uint64_t bits = ListedBits(scores + i, count - i, bound);
    uint32_t* to = positions + written;
    written += static_cast<uint32_t>(__builtin_popcountll(bits));
    const auto write = [&] {
      *to++ = i + static_cast<uint32_t>(_tzcnt_u64(bits));
      bits &= bits - 1;
    };
#pragma GCC unroll 4
    for (uint32_t j = 0; j < kUsual; ++j) write();
    while (bits != 0) write();
  }
  for (uint32_t i = list.count; i < written; ++i) {
    listed[i] = scores[positions[i]];
    positions[i] += first_position;
  }
  list.count = written;
}

// Codes that far ahead are prefetched.
constexpr uint32_t kPrefetchedSlots = 2048;
constexpr uint32_t kLineSlots = 64;

// Scores the tokens of a block, and returns the sums of their products.
template <typename Lanes, LaneRule kRule, bool k4x256>
inline typename Lanes::Sum ScoreBlock(const RoughSlots& slots, const LaneTables& tables,
                                      const BlockCodes& codes, uint32_t count, float* scores) {
  using Vector = typename Lanes::Vector;
  typename Lanes::Sum sum = {};
  const auto score = [&](uint32_t slot, uint32_t valid) __attribute__((always_inline)) {
    Vector tokens[kTokensPerTile];
    ScoreTile<Lanes, kRule, k4x256>(slots, tables, codes, slot, valid, tokens);
    for (uint32_t i = valid; i < kTokensPerTile; ++i) tokens[i] = Vector{};
    if (kRule != LaneRule::kMaxOfSums) sum += Lanes::TileSum(tokens);
    _mm256_store_ps(scores + slot, JoinLanes<Lanes, kRule>(tokens));
  };
  const uint32_t whole = count / kTokensPerTile * kTokensPerTile;
  for (uint32_t line = 0; line < whole; line += kLineSlots) {
    if (k4x256) {
      for (uint32_t j = 0; j < 4; ++j)
        __builtin_prefetch(codes.planes[j] + line + kPrefetchedSlots);
    }
    const uint32_t end = whole - line < kLineSlots ? whole : line + kLineSlots;
    for (uint32_t slot = line; slot < end; slot += kTokensPerTile) score(slot, kTokensPerTile);
  }
  if (whole < count) score(whole, count - whole);
  return sum;
}

template <typename Lanes, LaneRule kRule, bool k4x256>
void List(const RoughSlots& slots, const LaneTables& tables, float least, double* lane_sums,
          RoughList& list) {
  alignas(64) uint8_t bytes[kMaxSubspaces][kBlockSlots];
  alignas(64) uint16_t offsets[kBlockSlots];
  alignas(64) float scores[kBlockSlots];
  BlockCodes codes;
  codes.offsets = offsets;
  uint32_t last_listed = kBlockSlots;  // tokens that were listed of the last block
  for (uint32_t begin = 0; begin < slots.slot_count; begin += kBlockSlots) {
    const uint32_t rest = slots.slot_count - begin;
    const uint32_t count = rest < kBlockSlots ? rest : kBlockSlots;
    if (slots.nibble_planes) SplitNibbles(slots, begin, count, bytes);
    for (uint32_t j = 0; j < slots.subspace_count; ++j) {
      codes.planes[j] =
          slots.nibble_planes ? bytes[j] : slots.planes + j * slots.plane_stride + begin;
    }
    if (k4x256) FillOffsets(codes.planes[0], count, kOffsetShift<Lanes>, offsets);
    const typename Lanes::Sum sum =
        ScoreBlock<Lanes, kRule, k4x256>(slots, tables, codes, count, scores);
    if (kRule != LaneRule::kMaxOfSums) {
      constexpr uint32_t kSums = sizeof(sum) / sizeof(float);
      float sums[kSums];
      __builtin_memcpy(sums, &sum, sizeof(sum));
      for (uint32_t i = 0; i < kSums; ++i) {
        lane_sums[i % Lanes::kCount] += static_cast<double>(sums[i]);
      }
    }
    const uint32_t before = list.count;
    const uint32_t first_position = slots.first_position + begin;
    // Two on average among kListStep, of the four that ListFew writes without branches.
    if (last_listed <= 2 * (kBlockSlots / kListStep)) {
      ListFew(scores, count, least, first_position, list);
    } else {
      AppendScores(scores, count, first_position, least, list);
    }
    last_listed = list.count - before;
  }
}

template <typename Lanes, LaneRule kRule>
void ListByCount(const RoughSlots& slots, const LaneTables& tables, float least, double* lane_sums,
                 RoughList& list) {
  if (slots.subspace_count == 4 && slots.bits == 8) {
    List<Lanes, kRule, true>(slots, tables, least, lane_sums, list);
  } else {
    List<Lanes, kRule, false>(slots, tables, least, lane_sums, list);
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

}  // namespace

void InterleaveLanes(const float* rows, size_t row_stride, uint32_t head_count, uint32_t count,
                     uint32_t lanes, float* to) {
  constexpr uint32_t kHeads = 4;
  for (uint32_t lane = 0; lane < lanes; lane += kHeads) {
    for (uint32_t c = 0; c < count; c += kHeads) {
      __m128 x[kHeads];
      for (uint32_t i = 0; i < kHeads; ++i) {
        x[i] = lane + i < head_count ? _mm_loadu_ps(rows + (lane + i) * row_stride + c)
                                     : _mm_setzero_ps();
      }
      _MM_TRANSPOSE4_PS(x[0], x[1], x[2], x[3]);
      for (uint32_t i = 0; i < kHeads; ++i) _mm_store_ps(to + (c + i) * lanes + lane, x[i]);
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

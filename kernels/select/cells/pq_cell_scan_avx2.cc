// Positions of member cells by byte shuffles of 64 tokens at a time. No scores are computed.
//
// A staircase takes one table of 64 bytes for each plane. Any other set takes eight tables, of
// which the upper bits of the second code choose one, and a bit test.
#include <immintrin.h>

#include "kernels/base/simd/byte_table_avx2.h"
#include "kernels/base/simd/compress_avx2.h"
#include "kernels/base/simd/take_quota_bmi2.h"
#include "kernels/select/cells/pq_cells.h"

namespace pqcached::kernels {
namespace {

constexpr uint32_t kGroup = 64;

struct PlaneCodes {
  __m256i code_0[2];
  __m256i code_1[2];
};

inline uint64_t JoinBits(__m256i low, __m256i high) {
  return static_cast<uint32_t>(_mm256_movemask_epi8(low)) |
         uint64_t{static_cast<uint32_t>(_mm256_movemask_epi8(high))} << 32u;
}

// Returns all bits of the bytes in which `bytes` has bit code % 8 set.
inline __m256i HasBit(__m256i bytes, __m256i code) {
  const __m256i bits = _mm256_set1_epi64x(static_cast<long long>(0x8040201008040201ull));
  const __m256i bit = _mm256_shuffle_epi8(bits, _mm256_and_si256(code, _mm256_set1_epi8(7)));
  return _mm256_cmpeq_epi8(_mm256_and_si256(bytes, bit), bit);
}

// Sets of member cells in three representations; Test returns the membership of 64 tokens as bits.
struct StaircaseSet {
  static constexpr bool kTwoPlanes = true;
  const CellMembers& members;

  uint64_t Test(const PlaneCodes& codes) const {
    const BytePair rank = FindBytes<6>(members.rank, codes.code_1);
    const BytePair cut = FindBytes<6>(members.cut, codes.code_0);
    // Both are at most 64, so a signed comparison is right.
    return JoinBits(_mm256_cmpgt_epi8(cut.bytes[0], rank.bytes[0]),
                    _mm256_cmpgt_epi8(cut.bytes[1], rank.bytes[1]));
  }
};

struct BitRowSet {
  static constexpr bool kTwoPlanes = true;
  const CellMembers& members;

  // Chooses among the rows from `row` on by bits kLevel + 2 and below of code_1.
  template <uint32_t kLevel>
  [[gnu::always_inline]] BytePair Choose(uint32_t row, const PlaneCodes& codes) const {
    if constexpr (kLevel == 0) {
      return FindBytes<6>(members.above[row], codes.code_0);
    } else {
      BytePair found = Choose<kLevel - 1>(row, codes);
      const BytePair other = Choose<kLevel - 1>(row + (1u << (kLevel - 1)), codes);
      for (uint32_t i = 0; i < 2; ++i) {
        // Moves the bit to bit 7.
        const __m256i choice = _mm256_slli_epi16(codes.code_1[i], 5 - static_cast<int>(kLevel));
        found.bytes[i] = _mm256_blendv_epi8(found.bytes[i], other.bytes[i], choice);
      }
      return found;
    }
  }

  uint64_t Test(const PlaneCodes& codes) const {
    const BytePair rows = Choose<3>(0, codes);
    return JoinBits(HasBit(rows.bytes[0], codes.code_1[0]), HasBit(rows.bytes[1], codes.code_1[1]));
  }
};

struct ByteSet {
  static constexpr bool kTwoPlanes = false;
  const CellMembers& members;

  uint64_t Test(const PlaneCodes& codes) const {
    const __m256i low_bits = _mm256_set1_epi8(31);
    const __m256i index[2] = {_mm256_and_si256(_mm256_srli_epi16(codes.code_0[0], 3), low_bits),
                              _mm256_and_si256(_mm256_srli_epi16(codes.code_0[1], 3), low_bits)};
    const BytePair rows = FindBytes<5>(members.above[0], index);
    return JoinBits(HasBit(rows.bytes[0], codes.code_0[0]), HasBit(rows.bytes[1], codes.code_0[1]));
  }
};

template <typename Set>
inline PlaneCodes LoadCodes(const uint8_t* plane_0, const uint8_t* plane_1) {
  PlaneCodes codes;
  for (uint32_t i = 0; i < 2; ++i) {
    codes.code_0[i] = LoadBytes(plane_0 + i * 32);
    codes.code_1[i] = Set::kTwoPlanes ? LoadBytes(plane_1 + i * 32) : _mm256_setzero_si256();
  }
  return codes;
}

// Returns the tokens of tied cells as bits.
uint64_t TestTied(const CellMembers& members, const PlaneCodes& codes) {
  uint64_t tied = 0;
  for (uint32_t cell = 0; cell < members.tied_count; ++cell) {
    const __m256i tied_0 = _mm256_set1_epi8(static_cast<char>(members.tied[cell][0]));
    const __m256i tied_1 = _mm256_set1_epi8(static_cast<char>(members.tied[cell][1]));
    __m256i equal[2];
    for (uint32_t i = 0; i < 2; ++i) {
      equal[i] = _mm256_and_si256(_mm256_cmpeq_epi8(codes.code_0[i], tied_0),
                                  _mm256_cmpeq_epi8(codes.code_1[i], tied_1));
    }
    tied |= JoinBits(equal[0], equal[1]);
  }
  return tied;
}

// Appends positions. Entries from `written` up to the capacity may be overwritten.
struct PositionWriter {
  uint32_t* positions;
  uint32_t capacity;
  uint32_t written;

  // Appends first_position + bit for every set bit. REQUIRES: they fit.
  //
  // The number of bits is unpredictable, so the first kUsual positions are written without branches
  // that depend on it.
  template <uint32_t kUsual>
  [[gnu::always_inline]] void Write(uint64_t mask, uint32_t first_position) {
    const auto count = static_cast<uint32_t>(__builtin_popcountll(mask));
    uint32_t* out = positions + written;
    const bool has_room = capacity - written >= kUsual;
    written += count;
    if (has_room) {
#pragma GCC unroll 12
      for (uint32_t i = 0; i < kUsual; ++i, mask &= mask - 1) {
        out[i] = first_position + LowestBit(mask);
      }
      out += kUsual;
    }
    for (; mask != 0; mask &= mask - 1) *out++ = first_position + LowestBit(mask);
  }

  // Returns 64 if no bit is set.
  static uint32_t LowestBit(uint64_t mask) { return static_cast<uint32_t>(_tzcnt_u64(mask)); }
};

// Selects tied tokens while the quota lasts, then only tokens above the threshold.
template <typename Set, uint32_t kUsual>
void ScanSpan(const CellMembers& members, const CellScanSpan& span, CellScanOutput& output) {
  const Set above{members};
  PositionWriter writer = {output.positions, output.capacity, output.written};
  uint32_t quota = members.tied_count == 0 ? 0 : output.equal_quota;
  const uint32_t quota_kept = output.equal_quota - quota;
  uint32_t slot = span.slot_begin;
  const auto emit = [&](const PlaneCodes& codes, uint64_t valid) {
    uint64_t mask = above.Test(codes) & valid;
    if (quota > 0) mask |= TakeQuota(TestTied(members, codes) & valid, quota);
    writer.Write<kUsual>(mask, span.first_position + slot);
  };
  for (; span.slot_end - slot >= kGroup; slot += kGroup) {
    emit(LoadCodes<Set>(span.plane_0 + slot, span.plane_1 + (Set::kTwoPlanes ? slot : 0)), ~0ull);
  }
  if (slot < span.slot_end) {
    const uint32_t rest = span.slot_end - slot;
    uint8_t rest_0[kGroup] = {};
    uint8_t rest_1[kGroup] = {};
    __builtin_memcpy(rest_0, span.plane_0 + slot, rest);
    if (Set::kTwoPlanes) __builtin_memcpy(rest_1, span.plane_1 + slot, rest);
    emit(LoadCodes<Set>(rest_0, rest_1), (1ull << rest) - 1);
  }
  output.written = writer.written;
  output.equal_quota = quota + quota_kept;
}

template <typename Set>
void Scan(const CellMembers& members, const CellScanSpan& span, CellScanOutput& output) {
  // About as many as are selected of 64 tokens, if the rest of the positions comes from this span.
  const uint64_t usual = uint64_t{output.capacity - output.written} * kGroup;
  const uint32_t slots = span.slot_end - span.slot_begin;
  if (usual < uint64_t{slots} * 2) return ScanSpan<Set, 3>(members, span, output);
  if (usual < uint64_t{slots} * 4) return ScanSpan<Set, 6>(members, span, output);
  ScanSpan<Set, 12>(members, span, output);
}

}  // namespace

void ScanCellsAvx2(const CellMembers& members, const CellScanSpan& span, CellScanOutput& output) {
  if (span.plane_1 == nullptr) return Scan<ByteSet>(members, span, output);
  if (members.is_staircase) return Scan<StaircaseSet>(members, span, output);
  Scan<BitRowSet>(members, span, output);
}

}  // namespace pqcached::kernels

// Positions of member cells by byte look-ups of 64 tokens at a time, written once for AVX2 and
// NEON. No scores are computed.
//
// A staircase takes one table of 64 bytes for each plane. Any other set takes eight tables, of
// which the upper bits of the second code choose one, and a bit test.
//
// Include only in instruction-set files, behind byte_table_*.h and take_quota_*.h of one
// instruction set; the anonymous namespace keeps every copy local to its file.
#ifndef PQCACHED_KERNELS_SELECT_CELLS_PQ_CELL_SCAN_SIMD_H_
#define PQCACHED_KERNELS_SELECT_CELLS_PQ_CELL_SCAN_SIMD_H_

#include "kernels/select/cells/pq_cells.h"

namespace pqcached::kernels {
namespace {

constexpr uint32_t kGroup = 64;

struct PlaneCodes {
  Bytes64 code_0;
  Bytes64 code_1;
};

// Sets of member cells in three representations; Test returns the membership of 64 tokens as bits.
struct StaircaseSet {
  static constexpr bool kTwoPlanes = true;
  const CellMembers& members;

  uint64_t Test(const PlaneCodes& codes) const {
    const Bytes64 rank = FindBytes<6>(members.rank, codes.code_1);
    const Bytes64 cut = FindBytes<6>(members.cut, codes.code_0);
    Bytes64 above;  // both are at most 64
    for (uint32_t i = 0; i < kByteParts; ++i)
      above.part[i] = LargerBytes(cut.part[i], rank.part[i]);
    return JoinBits(above);
  }
};

// Returns all bits of the bytes in which a row has the bit of a code's lowest three bits.
[[gnu::always_inline]] inline Bytes64 HaveBits(const Bytes64& rows, const Bytes64& code) {
  Bytes64 have;
  for (uint32_t i = 0; i < kByteParts; ++i) have.part[i] = HasBit(rows.part[i], code.part[i]);
  return have;
}

struct BitRowSet {
  static constexpr bool kTwoPlanes = true;
  const CellMembers& members;

  // Chooses among the rows from `row` on by bits kLevel + 2 and below of code_1.
  template <uint32_t kLevel>
  [[gnu::always_inline]] Bytes64 Choose(uint32_t row, const PlaneCodes& codes) const {
    if constexpr (kLevel == 0) {
      return FindBytes<6>(members.above[row], codes.code_0);
    } else {
      Bytes64 found = Choose<kLevel - 1>(row, codes);
      const Bytes64 other = Choose<kLevel - 1>(row + (1u << (kLevel - 1)), codes);
      for (uint32_t i = 0; i < kByteParts; ++i) {
        found.part[i] = ChooseByBit<kLevel + 2>(codes.code_1.part[i], found.part[i], other.part[i]);
      }
      return found;
    }
  }

  uint64_t Test(const PlaneCodes& codes) const {
    return JoinBits(HaveBits(Choose<3>(0, codes), codes.code_1));
  }
};

struct ByteSet {
  static constexpr bool kTwoPlanes = false;
  const CellMembers& members;

  uint64_t Test(const PlaneCodes& codes) const {
    Bytes64 index;
    for (uint32_t i = 0; i < kByteParts; ++i) index.part[i] = HighBits<3>(codes.code_0.part[i]);
    return JoinBits(HaveBits(FindBytes<5>(members.above[0], index), codes.code_0));
  }
};

template <typename Set>
inline PlaneCodes LoadCodes(const uint8_t* plane_0, const uint8_t* plane_1) {
  PlaneCodes codes = {.code_0 = LoadBytes64(plane_0), .code_1 = {}};
  if constexpr (Set::kTwoPlanes) codes.code_1 = LoadBytes64(plane_1);
  return codes;
}

// Returns the tokens of tied cells as bits.
uint64_t TestTied(const CellMembers& members, const PlaneCodes& codes) {
  uint64_t tied = 0;
  for (uint32_t cell = 0; cell < members.tied_count; ++cell) {
    const Bytes tied_0 = SetBytes(members.tied[cell][0]);
    const Bytes tied_1 = SetBytes(members.tied[cell][1]);
    Bytes64 equal;
    for (uint32_t i = 0; i < kByteParts; ++i) {
      equal.part[i] = AndBytes(EqualBytes(codes.code_0.part[i], tied_0),
                               EqualBytes(codes.code_1.part[i], tied_1));
    }
    tied |= JoinBits(equal);
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
        out[i] = first_position + LowestBit64(mask);
      }
      out += kUsual;
    }
    for (; mask != 0; mask &= mask - 1) *out++ = first_position + LowestBit64(mask);
  }
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

// Implements CellScan.
inline void ScanCells(const CellMembers& members, const CellScanSpan& span,
                      CellScanOutput& output) {
  if (span.plane_1 == nullptr) return Scan<ByteSet>(members, span, output);
  if (members.is_staircase) return Scan<StaircaseSet>(members, span, output);
  Scan<BitRowSet>(members, span, output);
}

}  // namespace
}  // namespace pqcached::kernels

#endif  // PQCACHED_KERNELS_SELECT_CELLS_PQ_CELL_SCAN_SIMD_H_

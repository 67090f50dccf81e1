// Positions of member cells with byte permutes (VBMI) and byte compression (VBMI2).
//
// A table of 64 bytes is one register, so a membership test of 64 tokens takes 2 permutes and 1
// comparison (staircases), or 4 two-register permutes, 3 blends and 1 bit test (any set of cells).
// No scores are computed.
#include <immintrin.h>

#include "kernels/base/simd/emit_avx512vbmi.h"
#include "kernels/select/cells/pq_cells.h"

namespace pqcached::kernels {
namespace {

// Sets of member cells in three representations; Test returns the membership of 64 tokens as bits.
struct StaircaseSet {
  static constexpr bool kTwoPlanes = true;
  static constexpr bool kAhead = false;

  __m512i rank;
  __m512i cut;

  __mmask64 Test(__m512i code_0, __m512i code_1) const {
    return _mm512_cmplt_epu8_mask(_mm512_permutexvar_epi8(code_1, rank),
                                  _mm512_permutexvar_epi8(code_0, cut));
  }
};

// Returns 1 << (i % 8) for each code i (its low four bits).
inline __m512i BitOf(__m512i code) {
  const __m512i bits = _mm512_set1_epi64(static_cast<long long>(0x8040201008040201ull));
  return _mm512_shuffle_epi8(bits, _mm512_and_si512(code, _mm512_set1_epi8(15)));
}

struct BitRowSet {
  static constexpr bool kTwoPlanes = true;
  static constexpr bool kAhead = true;

  __m512i rows[8];

  __mmask64 Test(__m512i code_0, __m512i code_1) const {
    // Bit 3 of code_1 selects within a pair of registers, bits 4 and 5 select the pair.
    const __m512i bit_3 = _mm512_and_si512(code_1, _mm512_set1_epi8(8));
    const __m512i index = _mm512_or_si512(code_0, _mm512_slli_epi16(bit_3, 3));
    const __mmask64 bit_4 = _mm512_test_epi8_mask(code_1, _mm512_set1_epi8(16));
    const __mmask64 bit_5 = _mm512_test_epi8_mask(code_1, _mm512_set1_epi8(32));
    const __m512i pair_0 = _mm512_permutex2var_epi8(rows[0], index, rows[1]);
    const __m512i pair_1 = _mm512_permutex2var_epi8(rows[2], index, rows[3]);
    const __m512i pair_2 = _mm512_permutex2var_epi8(rows[4], index, rows[5]);
    const __m512i pair_3 = _mm512_permutex2var_epi8(rows[6], index, rows[7]);
    const __m512i low = _mm512_mask_blend_epi8(bit_4, pair_0, pair_1);
    const __m512i high = _mm512_mask_blend_epi8(bit_4, pair_2, pair_3);
    return _mm512_test_epi8_mask(_mm512_mask_blend_epi8(bit_5, low, high), BitOf(code_1));
  }
};

struct ByteSet {
  static constexpr bool kTwoPlanes = false;
  static constexpr bool kAhead = false;

  __m512i bytes;  // [32], bit i % 8 of byte i / 8

  __mmask64 Test(__m512i code, __m512i) const {
    const __m512i index = _mm512_and_si512(_mm512_srli_epi16(code, 3), _mm512_set1_epi8(31));
    return _mm512_test_epi8_mask(_mm512_permutexvar_epi8(index, bytes), BitOf(code));
  }
};

StaircaseSet LoadStaircase(const uint8_t* rank, const uint8_t* cut) {
  return {_mm512_load_si512(rank), _mm512_load_si512(cut)};
}

BitRowSet LoadBitRows(const uint8_t (*rows)[64]) {
  BitRowSet set;
  for (int i = 0; i < 8; ++i) set.rows[i] = _mm512_load_si512(rows[i]);
  return set;
}

// Prefetch distance for sets with kAhead: their work on a group of 64 takes so long that the
// processor's own look-ahead is too short to hide the memory latency.
constexpr uint32_t kAheadBytes = 4096;

struct Codes {
  __m512i code_0;
  __m512i code_1;
};

template <typename Set>
inline Codes LoadCodes(const CellScanSpan& span, uint32_t slot, __mmask64 lanes) {
  Codes codes;
  codes.code_0 = _mm512_maskz_loadu_epi8(lanes, span.plane_0 + slot);
  if constexpr (Set::kAhead) {
    _mm_prefetch(reinterpret_cast<const char*>(span.plane_0 + slot + kAheadBytes), _MM_HINT_T1);
    _mm_prefetch(reinterpret_cast<const char*>(span.plane_1 + slot + kAheadBytes), _MM_HINT_T1);
  }
  codes.code_1 = Set::kTwoPlanes ? _mm512_maskz_loadu_epi8(lanes, span.plane_1 + slot)
                                 : _mm512_setzero_si512();
  return codes;
}

// The tied cells. Test always compares with the first one; Scan does not call Test when there is
// none.
struct TiedCells {
  __m512i first_0;
  __m512i first_1;

  explicit TiedCells(const CellMembers& members)
      : first_0(_mm512_set1_epi8(static_cast<char>(members.tied[0][0]))),
        first_1(_mm512_set1_epi8(static_cast<char>(members.tied[0][1]))) {}

  __mmask64 Test(const CellMembers& members, const Codes& codes) const {
    __mmask64 tied = _mm512_mask_cmpeq_epi8_mask(_mm512_cmpeq_epi8_mask(codes.code_0, first_0),
                                                 codes.code_1, first_1);
    for (uint32_t i = 1; i < members.tied_count; ++i) {
      const __m512i tied_0 = _mm512_set1_epi8(static_cast<char>(members.tied[i][0]));
      const __m512i tied_1 = _mm512_set1_epi8(static_cast<char>(members.tied[i][1]));
      const __mmask64 equal_0 = _mm512_cmpeq_epi8_mask(codes.code_0, tied_0);
      tied |= _mm512_mask_cmpeq_epi8_mask(equal_0, codes.code_1, tied_1);
    }
    return tied;
  }
};

// Selects tied tokens while the quota lasts, then only tokens above the threshold.
template <typename Set>
void Scan(const CellMembers& members, const Set& above, const CellScanSpan& span,
          CellScanOutput& output) {
  PositionWriter writer = {output.positions, output.capacity, output.written};
  const TiedCells tied_cells(members);
  uint32_t quota = members.tied_count == 0 ? 0 : output.equal_quota;
  const uint32_t quota_kept = output.equal_quota - quota;
  uint32_t slot = span.slot_begin;
  const uint32_t whole_end = span.slot_begin + (span.slot_end - span.slot_begin) / 64 * 64;
  for (; slot < whole_end && quota > 0; slot += kEmitGroup) {
    const Codes codes = LoadCodes<Set>(span, slot, ~0ull);
    const __mmask64 tied = TakeQuota(tied_cells.Test(members, codes), quota);
    writer.Write(above.Test(codes.code_0, codes.code_1) | tied, span.first_position + slot);
  }
  for (; slot < whole_end; slot += kEmitGroup) {
    const Codes codes = LoadCodes<Set>(span, slot, ~0ull);
    writer.Write(above.Test(codes.code_0, codes.code_1), span.first_position + slot);
  }
  if (slot < span.slot_end) {
    const __mmask64 valid = ValidLanes(slot, span.slot_end);
    const Codes codes = LoadCodes<Set>(span, slot, valid);
    __mmask64 mask = above.Test(codes.code_0, codes.code_1) & valid;
    if (quota > 0) mask |= TakeQuota(tied_cells.Test(members, codes) & valid, quota);
    writer.Write(mask, span.first_position + slot);
  }
  output.written = writer.written;
  output.equal_quota = quota + quota_kept;
}

}  // namespace

void ScanCellsAvx512Vbmi(const CellMembers& members, const CellScanSpan& span,
                         CellScanOutput& output) {
  if (span.plane_1 == nullptr) {
    Scan(members, ByteSet{_mm512_load_si512(members.above[0])}, span, output);
  } else if (members.is_staircase) {
    Scan(members, LoadStaircase(members.rank, members.cut), span, output);
  } else {
    Scan(members, LoadBitRows(members.above), span, output);
  }
}

}  // namespace pqcached::kernels

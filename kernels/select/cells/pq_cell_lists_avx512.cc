// Positions from posting lists for pages with few tokens. The index of each slot in the output is
// the number of smaller slots; 32 slots are compared at once. A bitmap of the page would cost more.
#include <immintrin.h>

#include "kernels/select/cells/pq_cell_list_loops.h"

namespace pqcached::kernels {
namespace {

constexpr uint32_t kLanes = 32;
constexpr uint32_t kMaxRegisters = 8;
constexpr uint32_t kMaxShort = kMaxRegisters * kLanes;

// Writes the positions of `count` different offsets in ascending order. The other elements of the
// kRegisters registers must be larger than any offset.
template <uint32_t kRegisters>
void Rank(const uint16_t* offsets, uint32_t count, uint32_t first_position, uint32_t* positions) {
  __m512i all[kRegisters];
  for (uint32_t i = 0; i < kRegisters; ++i) all[i] = _mm512_loadu_si512(offsets + i * kLanes);
  for (uint32_t i = 0; i < count; ++i) {
    const __m512i offset = _mm512_set1_epi16(static_cast<short>(offsets[i]));
    uint64_t smaller = 0;
    for (uint32_t j = 0; j < kRegisters; ++j) {
      smaller += static_cast<uint64_t>(__builtin_popcount(_mm512_cmplt_epu16_mask(all[j], offset)));
    }
    positions[smaller] = first_position + offsets[i];
  }
}

struct ShortByCounting {
  static bool Emit(const CellListPage& page, const PageRuns& range, CellListScratch& scratch,
                   CellScanOutput& output) {
    const bool with_tied = output.equal_quota > 0 && range.tied_end > range.above_end;
    // The first tokens of several tied lists are known only after ordering all their slots.
    if (with_tied && range.tied_end - range.above_end > 1) return false;
    const uint32_t run_end = with_tied ? range.tied_end : range.above_end;
    uint32_t most = 0;
    for (uint32_t i = range.begin; i < run_end; ++i) {
      most += static_cast<uint32_t>(scratch.runs[i].end - scratch.runs[i].begin);
    }
    if (most > kMaxShort) return false;
    if (most == 0) return true;

    alignas(64) uint16_t offsets[kMaxShort + kLanes];
    const bool whole = IsWhole(page);
    uint32_t count = 0;
    for (uint32_t i = range.begin; i < run_end; ++i) {
      const bool tied = i >= range.above_end;
      const CellListRun run =
          Candidates(page, scratch.runs[i], whole, tied ? output.equal_quota : ~0u);
      for (uint32_t begin = run.begin; begin < run.end; begin += kLanes) {
        const uint32_t rest = run.end - begin;
        const __mmask32 lanes = rest >= kLanes ? ~0u : (1u << rest) - 1u;
        _mm512_storeu_si512(offsets + count, _mm512_maskz_loadu_epi16(lanes, page.slots + begin));
        count += rest >= kLanes ? kLanes : rest;
      }
      if (tied) output.equal_quota -= static_cast<uint32_t>(run.end - run.begin);
    }
    // Padding offsets, which are the largest, fill the last of 1, 2, 4 or 8 registers.
    uint32_t registers = 1;
    while (registers * kLanes < count) registers *= 2;
    for (uint32_t i = count; i < registers * kLanes; i += kLanes) {
      _mm512_storeu_si512(offsets + i, _mm512_set1_epi16(-1));
    }
    uint32_t* const positions = output.positions + output.written;
    output.written += count;
    switch (registers) {
      case 1:
        Rank<1>(offsets, count, page.first_position, positions);
        break;
      case 2:
        Rank<2>(offsets, count, page.first_position, positions);
        break;
      case 4:
        Rank<4>(offsets, count, page.first_position, positions);
        break;
      default:
        Rank<8>(offsets, count, page.first_position, positions);
    }
    return true;
  }
};

}  // namespace

void EmitCellListsAvx512(const CellListPage* pages, uint32_t page_count, CellListScratch& scratch,
                         CellScanOutput& output) {
  EmitCellLists<ShortByCounting>(pages, page_count, scratch, output);
}

}  // namespace pqcached::kernels

// The loops of EmitCellLists, compiled once for any machine and once with bit instructions. The
// anonymous namespace keeps every copy local to its file.
#ifndef PQCACHED_KERNELS_SELECT_CELLS_PQ_CELL_LIST_LOOPS_H_
#define PQCACHED_KERNELS_SELECT_CELLS_PQ_CELL_LIST_LOOPS_H_

#include "kernels/select/cells/pq_cell_lists.h"

namespace pqcached::kernels {
namespace {

struct PageRuns {
  uint32_t begin;
  uint32_t above_end;
  uint32_t tied_end;
};

inline void PrefetchBegins(const CellListPage& page) {
  const ListedCells& listed = *page.listed;
  const uint32_t count = listed.above_count + listed.tied_count;
  for (uint32_t i = 0; i < count; ++i) {
    __builtin_prefetch(page.begins + listed.cells[i] * page.begin_stride);
  }
}

// Collects the non-empty lists of cells [first, last) and prefetches their ends.
inline uint32_t CollectRuns(const CellListPage& page, uint32_t first, uint32_t last, uint32_t noted,
                            CellListRun* runs) {
  for (uint32_t i = first; i < last; ++i) {
    const uint16_t* const begins = page.begins + page.listed->cells[i] * page.begin_stride;
    const CellListRun run = {.begin = begins[0], .end = begins[page.begin_stride]};
    runs[noted] = run;
    __builtin_prefetch(page.slots + run.begin);
    __builtin_prefetch(page.slots + run.end);
    noted += run.end > run.begin ? 1u : 0u;
  }
  return noted;
}

// Returns the index of the first entry in [begin, end) that is not below `slot`.
inline uint32_t LowerBound(const uint16_t* slots, uint32_t begin, uint32_t end, uint32_t slot) {
  while (begin < end) {
    const uint32_t middle = (begin + end) / 2;
    if (slots[middle] < slot) {
      begin = middle + 1;
    } else {
      end = middle;
    }
  }
  return begin;
}

inline bool IsWhole(const CellListPage& page) {
  return page.slot_begin == 0 && page.slot_end == CellListScratch::kWords * 64;
}

// Returns the candidates of a run, at most the first `limit` of them.
inline CellListRun Candidates(const CellListPage& page, CellListRun run, bool whole,
                              uint32_t limit) {
  uint32_t begin = run.begin;
  uint32_t end = run.end;
  if (!whole) {
    begin = LowerBound(page.slots, begin, end, page.slot_begin);
    end = LowerBound(page.slots, begin, end, page.slot_end);
  }
  if (end - begin > limit) end = begin + limit;
  return {.begin = static_cast<uint16_t>(begin), .end = static_cast<uint16_t>(end)};
}

inline void SetBits(const CellListPage& page, CellListRun run, uint64_t* bits, uint8_t* touched) {
  for (uint32_t i = run.begin; i < run.end; ++i) {
    const uint32_t slot = page.slots[i];
    bits[slot / 64] |= uint64_t{1} << (slot % 64);
    touched[slot / 64] = 1;
  }
}

// Moves tied tokens into `above`, in order, while the quota lasts, and drops the rest.
inline uint32_t MergeTied(CellListScratch& scratch, uint32_t quota) {
  for (uint32_t i = 0; i < CellListScratch::kWords; ++i) {
    uint64_t word = scratch.tied[i];
    if (word == 0) continue;
    scratch.tied[i] = 0;
    uint64_t taken = 0;
    for (; word != 0 && quota > 0; --quota) {
      taken |= word & (0 - word);
      word &= word - 1;
    }
    scratch.above[i] |= taken;
  }
  return quota;
}

inline uint32_t FirstBit(uint64_t word) {
  return static_cast<uint32_t>(__builtin_ctzll(word | uint64_t{1} << 63));
}

// Appends the positions of a word's bits.
inline uint32_t EmitWord(uint64_t word, uint32_t first_position, uint32_t* positions,
                         uint32_t written, uint32_t capacity) {
  constexpr uint32_t kAhead = 4;  // written without checking that so many bits are set
  const uint32_t end = written + static_cast<uint32_t>(__builtin_popcountll(word));
  if (written + kAhead <= capacity) {
    for (uint32_t i = 0; i < kAhead; ++i) {
      positions[written + i] = first_position + FirstBit(word);
      word &= word - 1;
    }
    written += kAhead;
  }
  for (; written < end; ++written) {
    positions[written] = first_position + FirstBit(word);
    word &= word - 1;
  }
  return end;
}

inline uint32_t EmitBitmap(CellListScratch& scratch, uint32_t first_position, uint32_t* positions,
                           uint32_t written, uint32_t capacity) {
  for (uint32_t group = 0; group < CellListScratch::kWords; group += 8) {
    uint64_t touched;
    __builtin_memcpy(&touched, scratch.touched + group, 8);
    if (touched == 0) continue;
    const uint64_t none = 0;
    __builtin_memcpy(scratch.touched + group, &none, 8);
    for (; touched != 0; touched &= touched - 1) {
      const uint32_t i = group + FirstBit(touched) / 8;
      const uint64_t word = scratch.above[i];
      scratch.above[i] = 0;
      written = EmitWord(word, first_position + i * 64, positions, written, capacity);
    }
  }
  return written;
}

struct NoShort {
  static bool Emit(const CellListPage&, const PageRuns&, CellListScratch&, CellScanOutput&) {
    return false;
  }
};

// Emits one page. Short handles pages of few tokens and returns false for all others.
template <typename Short>
inline void EmitPage(const CellListPage& page, const PageRuns& range, CellListScratch& scratch,
                     CellScanOutput& output) {
  if (Short::Emit(page, range, scratch, output)) return;
  const bool whole = IsWhole(page);
  for (uint32_t i = range.begin; i < range.above_end; ++i) {
    SetBits(page, Candidates(page, scratch.runs[i], whole, ~0u), scratch.above, scratch.touched);
  }
  if (output.equal_quota > 0 && range.tied_end > range.above_end) {
    for (uint32_t i = range.above_end; i < range.tied_end; ++i) {
      SetBits(page, Candidates(page, scratch.runs[i], whole, output.equal_quota), scratch.tied,
              scratch.touched);
    }
    output.equal_quota = MergeTied(scratch, output.equal_quota);
  }
  output.written =
      EmitBitmap(scratch, page.first_position, output.positions, output.written, output.capacity);
}

template <typename Short>
inline void EmitCellLists(const CellListPage* pages, uint32_t page_count, CellListScratch& scratch,
                          CellScanOutput& output) {
  PageRuns ranges[kMaxListPages];
  for (uint32_t i = 0; i < page_count; ++i) PrefetchBegins(pages[i]);
  uint32_t noted = 0;
  for (uint32_t i = 0; i < page_count; ++i) {
    const ListedCells& listed = *pages[i].listed;
    const uint32_t above = listed.above_count;
    ranges[i].begin = noted;
    ranges[i].above_end = noted = CollectRuns(pages[i], 0, above, noted, scratch.runs);
    ranges[i].tied_end = noted =
        CollectRuns(pages[i], above, above + listed.tied_count, noted, scratch.runs);
  }
  for (uint32_t i = 0; i < page_count; ++i) EmitPage<Short>(pages[i], ranges[i], scratch, output);
}

}  // namespace
}  // namespace pqcached::kernels

#endif  // PQCACHED_KERNELS_SELECT_CELLS_PQ_CELL_LIST_LOOPS_H_

// Positions of member cells from posting lists (pq_postings.h): what a selection of few tokens does
// instead of a pass over the codes.
//
// The slots of a page's lists go into a bitmap of the page, which gives them back in order. Lists
// lie scattered in memory, so they are prefetched for many pages together.
//
// Shared by pq_cell_select.cc and the instruction-set files; nobody else includes it.
#ifndef PQCACHED_KERNELS_PQ_CELL_LISTS_H_
#define PQCACHED_KERNELS_PQ_CELL_LISTS_H_

#include <cstddef>
#include <cstdint>

#include "kernels/pq_cells.h"

namespace pqcached::kernels {

// The member cells of one codebook that have tokens: above the threshold, then those tied with it.
struct ListedCells {
  uint16_t* cells;
  uint32_t above_count;
  uint32_t tied_count;
};

struct CellListPage {
  const uint16_t* begins;  // of cell 0
  size_t begin_stride;     // from cell to cell
  const uint16_t* slots;   // of the page
  // Candidates, counted from the page's first slot; kPostingPageSlots where the last is one.
  uint32_t slot_begin;
  uint32_t slot_end;
  uint32_t first_position;  // of the page's first slot
  const ListedCells* listed;
};

// Entries of one list, counted from the page's first.
struct CellListRun {
  uint16_t begin;
  uint16_t end;
};

// Pages and runs that are prefetched together, at most.
inline constexpr uint32_t kMaxListPages = 64;
inline constexpr uint32_t kMaxListRuns = 4096;

// All zero before and after a call, but for the runs.
struct CellListScratch {
  static constexpr uint32_t kWords = 32768 / 64;

  alignas(64) uint64_t above[kWords];  // bit per slot of a page
  alignas(64) uint64_t tied[kWords];
  alignas(64) uint8_t touched[kWords];  // 1: the word of `above` is not zero
  alignas(64) CellListRun runs[kMaxListRuns];
};

// Appends the positions of the pages' candidates whose cells are listed, page after page; tokens of
// tied cells while the quota lasts.
//
// REQUIRES: page_count <= kMaxListPages; all listed cells of all pages <= kMaxListRuns.
using CellListEmit = void (*)(const CellListPage* pages, uint32_t page_count,
                              CellListScratch& scratch, CellScanOutput& output);

void EmitCellListsPortable(const CellListPage* pages, uint32_t page_count, CellListScratch& scratch,
                           CellScanOutput& output);
void EmitCellListsAvx512(const CellListPage* pages, uint32_t page_count, CellListScratch& scratch,
                         CellScanOutput& output);
void EmitCellListsAvx2(const CellListPage* pages, uint32_t page_count, CellListScratch& scratch,
                       CellScanOutput& output);

}  // namespace pqcached::kernels

#endif  // PQCACHED_KERNELS_PQ_CELL_LISTS_H_

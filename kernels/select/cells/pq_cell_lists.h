// Positions of member cells from inverted lists (posting lists, pq_postings.h): used instead of a
// scan of the codes when few tokens are selected.
//
// The slots in a page's lists are collected in a bitmap of the page, which returns them in order.
// Lists are scattered in memory, so those of many pages are prefetched together.
//
// Included by pq_cell_select.cc and the instruction-set files only.
#ifndef PQCACHED_KERNELS_SELECT_CELLS_PQ_CELL_LISTS_H_
#define PQCACHED_KERNELS_SELECT_CELLS_PQ_CELL_LISTS_H_

#include <cstddef>
#include <cstdint>

#include "kernels/select/cells/pq_cells.h"

namespace pqcached::kernels {

// The member cells of one codebook that contain tokens: first those above the threshold, then those
// tied with it.
struct ListedCells {
  uint16_t* cells;
  uint32_t above_count;
  uint32_t tied_count;
};

struct CellListPage {
  const uint16_t* begins;  // list of cell 0
  size_t begin_stride;     // distance between cells
  const uint16_t* slots;   // slots of the page
  // Range of candidates relative to the page's first slot; slot_end is kPostingPageSlots when the
  // candidates reach the end of the page.
  uint32_t slot_begin;
  uint32_t slot_end;
  uint32_t first_position;  // position of the page's first slot
  const ListedCells* listed;
};

// Entries of one list, as indices into the page's slots.
struct CellListRun {
  uint16_t begin;
  uint16_t end;
};

// Largest number of pages and runs that are prefetched together.
inline constexpr uint32_t kMaxListPages = 64;
inline constexpr uint32_t kMaxListRuns = 4096;

// All fields except `runs` are zero before and after a call.
struct CellListScratch {
  static constexpr uint32_t kWords = 32768 / 64;

  alignas(64) uint64_t above[kWords];  // bit per slot of a page
  alignas(64) uint64_t tied[kWords];
  alignas(64) uint8_t touched[kWords];  // 1: the word of `above` is not zero
  alignas(64) CellListRun runs[kMaxListRuns];
};

// Appends the positions of the pages' candidates whose cells are listed, page after page, and
// tokens of tied cells while the quota lasts.
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

#endif  // PQCACHED_KERNELS_SELECT_CELLS_PQ_CELL_LISTS_H_

// Posting lists are the inverted lists of the cells: the slots of every cell. A selection of few
// tokens reads the lists of its cells instead of all codes, at a cost that does not grow with the
// context.
//
// The slots [slot_begin, slot_end) are divided into *pages* of kPostingPageSlots slots; the last
// page may be shorter. A page lists its slots cell by cell, ascending within a cell, as 16-bit
// offsets from the page's first slot. The lists of page p begin at entry p * kPostingPageSlots of
// `slots`; within the page, cell c has the entries [begins[c, p], begins[c + 1, p]). The begins of
// a cell in all pages are adjacent, so that one read from memory finds them.
//
// The index takes 2 bytes per slot and 2 * (CellCount + 1) bytes per page: with 4096 cells, 3 bytes
// per token in segments of 8192 tokens, and 2.25 in segments of 32768 tokens or more.
#ifndef PQCACHED_KERNELS_SELECT_CELLS_PQ_POSTINGS_H_
#define PQCACHED_KERNELS_SELECT_CELLS_PQ_POSTINGS_H_

#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/base/exec.h"
#include "kernels/select/pq.h"

namespace pqcached::kernels {

inline constexpr uint32_t kPostingPageSlots = 32768;

constexpr uint32_t PostingPageCount(uint32_t slot_count) {
  return slot_count / kPostingPageSlots + (slot_count % kPostingPageSlots != 0 ? 1u : 0u);
}

// Returns the number of entries of `begins`, [CellCount + 1, PostingPageCount].
// REQUIRES: HasCells(g).
constexpr size_t PostingBeginCount(const PqGeometry& g, uint32_t slot_count) {
  return size_t{PostingPageCount(slot_count)} * (CellCount(g) + 1);
}

struct PqBuildPostingsArgs {
  PqGeometry geometry;
  const uint8_t* planes = nullptr;  // plane at slot 0
  size_t plane_stride = 0;          // bytes
  uint32_t slot_begin = 0;
  uint32_t slot_end = 0;
  std::span<uint16_t> begins;  // [PostingBeginCount], overwritten
  std::span<uint16_t> slots;   // [slot_end - slot_begin], overwritten
};

// Fills the posting lists of [slot_begin, slot_end).
//
// REQUIRES: HasCells(geometry); shapes as above; begins and slots overlap nothing else.
void PqBuildPostings(const Exec& exec, const PqBuildPostingsArgs& args);

}  // namespace pqcached::kernels

#endif  // PQCACHED_KERNELS_SELECT_CELLS_PQ_POSTINGS_H_

// Posting lists: the slots of every cell, so that a selection of few tokens reads the lists of its
// cells instead of all codes, at a cost that does not grow with the context.
//
// The slots [slot_begin, slot_end) are cut into *pages* of kPostingPageSlots slots, the last one
// shorter. A page lists its slots cell by cell, ascending within a cell, as 16-bit offsets from the
// page's first slot; the lists of page p begin at entry p * kPostingPageSlots of `slots`. There,
// cell c has the entries [begins[c, p], begins[c + 1, p]). A cell's begins in all pages lie side by
// side, so that one read from memory finds them.
//
// Index bytes: 2 a slot, and 2 * (CellCount + 1) a page: 3 a token with 4096 cells and 8192 tokens
// in a segment, 2.25 from 32768 tokens on.
#ifndef PQCACHED_KERNELS_PQ_POSTINGS_H_
#define PQCACHED_KERNELS_PQ_POSTINGS_H_

#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/exec.h"
#include "kernels/pq.h"

namespace pqcached::kernels {

inline constexpr uint32_t kPostingPageSlots = 32768;

constexpr uint32_t PostingPageCount(uint32_t slot_count) {
  return slot_count / kPostingPageSlots + (slot_count % kPostingPageSlots != 0 ? 1u : 0u);
}

// Entries of `begins`, [CellCount + 1, PostingPageCount]. REQUIRES: HasCells(g).
constexpr size_t PostingBeginCount(const PqGeometry& g, uint32_t slot_count) {
  return size_t{PostingPageCount(slot_count)} * (CellCount(g) + 1);
}

struct PqBuildPostingsArgs {
  PqGeometry geometry;
  const uint8_t* planes = nullptr;  // of slot 0
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

#endif  // PQCACHED_KERNELS_PQ_POSTINGS_H_

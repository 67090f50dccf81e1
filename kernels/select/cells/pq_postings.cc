#include "kernels/select/cells/pq_postings.h"

#include <algorithm>

#include "kernels/base/check.h"

namespace pqcached::kernels {
namespace {

struct Page {
  uint32_t slot_begin;
  uint32_t slot_end;
  uint16_t* begins;     // list of cell 0
  size_t begin_stride;  // distance between cells
  uint16_t* slots;      // [slot_end - slot_begin]
};

// The specification: visits cell after cell, and slot after slot.
void FillPageReference(const PqBuildPostingsArgs& args, const Page& page) {
  const uint32_t cell_count = CellCount(args.geometry);
  uint32_t written = 0;
  for (uint32_t cell = 0; cell < cell_count; ++cell) {
    page.begins[cell * page.begin_stride] = static_cast<uint16_t>(written);
    for (uint32_t slot = page.slot_begin; slot < page.slot_end; ++slot) {
      if (GetCell(args.geometry, args.planes, args.plane_stride, slot) != cell) continue;
      page.slots[written++] = static_cast<uint16_t>(slot - page.slot_begin);
    }
  }
  page.begins[cell_count * page.begin_stride] = static_cast<uint16_t>(written);
}

// Counting sort. `next` first counts the slots of the cells, and then contains the index of each
// one's next slot; `begins` of many pages lie too far apart to count in them.
template <typename CellOf>
void SortPage(const Page& page, uint32_t cell_count, CellOf cell_of) {
  uint16_t next[1u << kMaxCellBits] = {};
  for (uint32_t slot = page.slot_begin; slot < page.slot_end; ++slot) ++next[cell_of(slot)];
  uint32_t sum = 0;
  for (uint32_t cell = 0; cell < cell_count; ++cell) {
    const uint32_t count = next[cell];
    next[cell] = static_cast<uint16_t>(sum);
    page.begins[cell * page.begin_stride] = static_cast<uint16_t>(sum);
    sum += count;
  }
  page.begins[cell_count * page.begin_stride] = static_cast<uint16_t>(sum);
  for (uint32_t slot = page.slot_begin; slot < page.slot_end; ++slot) {
    page.slots[next[cell_of(slot)]++] = static_cast<uint16_t>(slot - page.slot_begin);
  }
}

void FillPage(const PqBuildPostingsArgs& args, const Page& page) {
  const PqGeometry& g = args.geometry;
  const uint8_t* const planes = args.planes;
  const size_t stride = args.plane_stride;
  if (PlaneCount(g) == 2) {
    const uint8_t* const plane_1 = planes + stride;
    const uint32_t bits = g.bits;
    return SortPage(page, CellCount(g), [planes, plane_1, bits](uint32_t slot) {
      return uint32_t{planes[slot]} << bits | plane_1[slot];
    });
  }
  SortPage(page, CellCount(g),
           [&g, planes, stride](uint32_t slot) { return GetCell(g, planes, stride, slot); });
}

}  // namespace

void PqBuildPostings(const Exec& exec, const PqBuildPostingsArgs& args) {
  PQC_CHECK(IsValid(args.geometry) && HasCells(args.geometry));
  PQC_CHECK(args.slot_begin <= args.slot_end);
  const uint32_t slot_count = args.slot_end - args.slot_begin;
  PQC_CHECK(args.begins.size() == PostingBeginCount(args.geometry, slot_count));
  PQC_CHECK(args.slots.size() == slot_count);
  const uint32_t page_count = PostingPageCount(slot_count);
  for (uint32_t i = 0; i < page_count; ++i) {
    const uint32_t first = i * kPostingPageSlots;
    const Page page = {
        .slot_begin = args.slot_begin + first,
        .slot_end = args.slot_begin + std::min(slot_count, first + kPostingPageSlots),
        .begins = args.begins.data() + i,
        .begin_stride = page_count,
        .slots = args.slots.data() + first};
    if (exec.level == Level::kReference) {
      FillPageReference(args, page);
    } else {
      FillPage(args, page);
    }
  }
}

}  // namespace pqcached::kernels

// PqBuildPostings: every level against the definition.
#include "kernels/select/cells/pq_postings.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

namespace pqcached::kernels {
namespace {

struct Case {
  PqGeometry geometry;
  uint32_t slot_begin = 0;
  uint32_t slot_end = 0;
  uint32_t distinct_codes = 256;  // at most
};

// Every slot stands once, in the list of its cell, and lists ascend.
void ExpectLists(const Case& c, uint64_t seed) {
  const PqGeometry& g = c.geometry;
  std::mt19937_64 random(seed);
  // No byte more than the slots, so that a sanitizer sees reads beyond them.
  std::vector<uint8_t> planes(size_t{c.slot_end} * PlaneCount(g));
  const uint32_t distinct = std::min(c.distinct_codes, CentroidCount(g));
  for (uint32_t slot = 0; slot < c.slot_end; ++slot) {
    for (uint32_t subspace = 0; subspace < g.subspace_count; ++subspace) {
      const auto code = static_cast<uint32_t>(CentroidCount(g) - 1 - random() % distinct);
      SetCode(g, planes.data(), c.slot_end, subspace, slot, code);
    }
  }
  const uint32_t slot_count = c.slot_end - c.slot_begin;
  for (const Level level : AvailableLevels()) {
    // The reference takes CellCount passes.
    if (level == Level::kReference && slot_count > 5000) continue;
    SCOPED_TRACE(testing::Message() << LevelName(level) << " m " << g.subspace_count << " b "
                                    << g.bits << " slots " << slot_count);
    std::vector<uint16_t> begins(PostingBeginCount(g, slot_count), 0xABCD);
    std::vector<uint16_t> slots(slot_count, 0xABCD);
    PqBuildPostings(Exec{level}, {.geometry = g,
                                  .planes = planes.data(),
                                  .plane_stride = c.slot_end,
                                  .slot_begin = c.slot_begin,
                                  .slot_end = c.slot_end,
                                  .begins = begins,
                                  .slots = slots});
    const uint32_t page_count = PostingPageCount(slot_count);
    for (uint32_t page = 0; page < page_count; ++page) {
      const uint32_t first = page * kPostingPageSlots;
      const uint32_t in_page = std::min(kPostingPageSlots, slot_count - first);
      ASSERT_EQ(begins[page], 0);
      ASSERT_EQ(begins[CellCount(g) * page_count + page], in_page);
      for (uint32_t cell = 0; cell < CellCount(g); ++cell) {
        const uint32_t begin = begins[cell * page_count + page];
        const uint32_t end = begins[(cell + 1) * page_count + page];
        ASSERT_LE(begin, end);
        for (uint32_t i = begin; i < end; ++i) {
          const uint32_t slot = slots[first + i];
          ASSERT_LT(slot, in_page);
          ASSERT_TRUE(i == begin || slots[first + i - 1] < slot);
          ASSERT_EQ(GetCell(g, planes.data(), c.slot_end, c.slot_begin + first + slot), cell);
        }
      }
    }
  }
}

TEST(PqPostingsTest, ListsEverySlotOnceForAllGeometriesAndSizes) {
  uint64_t seed = 0;
  for (const uint32_t subspaces : {1u, 2u}) {
    for (uint32_t bits = 4; bits <= 8; ++bits) {
      const PqGeometry geometry{.key_dim = 32, .subspace_count = subspaces, .bits = bits};
      if (!HasCells(geometry)) continue;
      for (const uint32_t size : {0u, 1u, 63u, 64u, 65u, 127u, 128u, 129u, 4097u}) {
        ExpectLists({geometry, 0, size}, ++seed);
        ExpectLists({geometry, 7, 7 + size, 3}, ++seed);
      }
    }
  }
}

TEST(PqPostingsTest, ListsEverySlotOnceOverPages) {
  for (const uint32_t size : {kPostingPageSlots - 1, kPostingPageSlots, kPostingPageSlots + 1,
                              2 * kPostingPageSlots, 3 * kPostingPageSlots - 5}) {
    for (const uint32_t distinct : {1u, 64u}) {
      ExpectLists({{.key_dim = 32, .subspace_count = 2, .bits = 6}, 5, 5 + size, distinct}, size);
    }
  }
}

}  // namespace
}  // namespace pqcached::kernels

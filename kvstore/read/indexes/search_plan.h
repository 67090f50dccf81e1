// SearchPlan: the candidates of a search, cut at segment boundaries.
#ifndef PQCACHED_KVSTORE_READ_INDEXES_SEARCH_PLAN_H_
#define PQCACHED_KVSTORE_READ_INDEXES_SEARCH_PLAN_H_

#include <cstddef>
#include <cstdint>
#include <span>

#include "kvstore/read/layer_view.h"

namespace pqcached::kvstore {

// A run of candidate slots of one segment.
struct SearchPiece {
  const SegmentView* segment = nullptr;
  uint32_t slot_begin = 0;
  uint32_t slot_end = 0;
  uint32_t codebook = 0;  // ordinal among the codebooks of the plan

  uint32_t token_count() const { return slot_end - slot_begin; }
  uint32_t first_position() const { return segment->first_position + slot_begin; }
};

struct SearchPlan {
  std::span<const SearchPiece> pieces;               // ascending
  std::span<const CodebookHeader* const> codebooks;  // of the pieces; neighbours may share
  uint32_t token_count = 0;
};

struct SearchPlanSize {
  size_t piece_count = 0;
  size_t codebook_count = 0;
  uint32_t token_count = 0;
};

}  // namespace pqcached::kvstore

#endif  // PQCACHED_KVSTORE_READ_INDEXES_SEARCH_PLAN_H_

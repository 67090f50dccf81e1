// Selection of pages on the device: aligned runs of tokens [n x page_tokens, (n + 1) x
// page_tokens), page number n. Scores, budgets and ties are those of the selection on the CPU
// (kvstore/read/select/token_pages.h). The pages are the same with the mean or the maximum of
// logits; under the softmax rules they may differ within the rounding of
// kernels/select/pq_select.h.
//
// A page's score needs no score of a token in memory: one block computes the scores of a chunk,
// joins them over the kv heads in registers, and keeps the maxima of its pages. One block per list
// then selects. Seats and lanes are those of kernels/cuda/step/seats.h.
#ifndef PQCACHED_KERNELS_CUDA_STEP_PAGES_H_
#define PQCACHED_KERNELS_CUDA_STEP_PAGES_H_

#include <cstddef>
#include <cstdint>

#include "kernels/base/group_rule.h"
#include "kernels/cuda/select/select.h"
#include "kernels/cuda/status.h"
#include "kernels/cuda/step/own_rows.h"
#include "kernels/cuda/step/refused.h"
#include "kernels/cuda/step/seats.h"
#include "kernels/select/head_rule.h"

namespace pqcached::kernels::cuda {

inline constexpr uint32_t kMinPageTokens = 16;

// Tokens of one item that are no candidates: sink [0, sink_end) and window [window_begin,
// window_end), the query tokens included. Candidates lie between the two.
struct PageItem {
  uint32_t sink_end = 0;
  uint32_t window_begin = 0;
  uint32_t window_end = 0;
};

// Terms of a selection, and its output in device memory.
struct PageLists {
  uint32_t page_tokens = kMinPageTokens;  // 16, 32 or 64
  HeadRule heads = HeadRule::kEach;
  // Pages that hold a sink (window) token which is not excluded are in every list, and do not
  // compete.
  bool with_sink = false;
  bool with_window = false;
  int32_t* lists = nullptr;     // [item, kv_heads or 1, capacity], ascending, then -1
  uint32_t capacity = 0;        // of a list
  uint32_t* lengths = nullptr;  // [item]: pages of each list of the item
};

// Capacities, which determine scratch memory.
struct PageShape {
  uint32_t group_size = 0;  // G, times the query tokens: 1 to 64
  uint32_t lane_capacity = 0;
  uint32_t chunk_capacity = 0;  // chunks of all lanes
  uint32_t token_capacity = 0;  // candidates lie below it
};

// Returns the scratch size in bytes.
size_t PageScratchBytes(const PageShape& shape);

struct SelectPagesArgs {
  SeatShape seat_shape;                // group_size times query_length queries share a selection
  const SeatItem* seats = nullptr;     // [seat_capacity], in device memory
  const PageItem* items = nullptr;     // [seat_capacity], in device memory
  const OwnRange* excluded = nullptr;  // [excluded_capacity], in device memory: tokens of sink and
                                       // window that do not count, disjoint; empty ones may follow
  uint32_t excluded_capacity = 0;
  PqGeometry geometry;
  GroupRule rule = GroupRule::kSumSoftmax;
  // Candidates as PqSelect reads them, with at least one lane per kv head of each seat. The chunks
  // of an item's lanes have the same positions, in the same order. k tokens become k / page_tokens
  // pages, rounded up; all pages with a candidate where k is all candidates.
  SelectTables candidates = {};
  uint32_t lane_chunk_capacity = 0;  // chunks of one lane
  const float* tables = nullptr;     // [table, G, subspace_count, 2^bits]
  uint32_t token_capacity = 0;       // candidates lie below it
  PageLists pages = {};
  // An item whose lists have more pages than the capacity: they are written up to that.
  RefusedElement refused_capacity = {};
  void* scratch = nullptr;  // PageScratchBytes, 256-byte aligned
  size_t scratch_bytes = 0;
};

// Selects pages; at most 3 launches. Lists of items without a seat are not written.
//
// Errors: those of the launches; cudaErrorInvalidValue when a number is out of range or the scratch
// is too small; then nothing is launched.
KernelStatus SelectPages(const SelectPagesArgs& args, Stream stream);

}  // namespace pqcached::kernels::cuda

#endif  // PQCACHED_KERNELS_CUDA_STEP_PAGES_H_

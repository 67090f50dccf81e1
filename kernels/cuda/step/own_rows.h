// Rows that a decode step attends to without selecting them: sink and window.
//
// The rows of an item are in three places. Those of positions below `stored_end` are in the spans
// of its lanes (kernels/cuda/rows.h); those up to the step's first token are *recent rows* of
// earlier steps, which are not stored yet; those of the step itself are the ones that PackStepRows
// (kernels/cuda/pack.h) has packed. One decode call runs ArrangeOwnRows, LocateRows and
// AppendOwnRows, and attends to the result. Seats and lanes are those of kernels/cuda/step/seats.h.
#ifndef PQCACHED_KERNELS_CUDA_STEP_OWN_ROWS_H_
#define PQCACHED_KERNELS_CUDA_STEP_OWN_ROWS_H_

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/status.h"
#include "kernels/cuda/step/seats.h"

namespace pqcached::kernels::cuda {

// The sink and the window of one item, by positions.
struct OwnItem {
  uint32_t query_position = 0;  // of its first query token
  uint32_t stored_end = 0;      // at most query_position
  uint32_t sink_end = 0;        // the sink is [0, sink_end)
  uint32_t window_begin = 0;    // at least sink_end, at most query_position; the window ends with
                                // the query token itself
};

struct OwnRange {
  uint32_t begin = 0;
  uint32_t end = 0;
};

struct ArrangeOwnRowsArgs {
  SeatShape shape;                     // query_length: tokens that this launch works on
  const SeatItem* seats = nullptr;     // [seat_capacity], in device memory
  const OwnItem* items = nullptr;      // [seat_capacity], in device memory
  const OwnRange* excluded = nullptr;  // [excluded_capacity], in device memory: positions that are
                                       // left out, ascending and disjoint; empty ones may follow
  uint32_t excluded_capacity = 0;
  uint32_t first_token = 0;    // of the items' query tokens, the first one of this launch
  uint32_t window_tokens = 0;  // 0: sink and window are those of the items. Otherwise there is no
                               // sink, and each token's window has this length, with the token
  uint32_t* lane_positions = nullptr;  // [lane, lane_stride], written up to own_counts
  size_t lane_stride = 0;              // positions beyond it are left out
  uint32_t* lane_counts = nullptr;     // [lane], overwritten: positions below stored_end
  uint32_t* own_counts = nullptr;      // [lane], overwritten: all positions
  // [lane, query_length, 2], overwritten: a token attends to entries [begin, end) of its lane's
  // positions.
  uint32_t* row_ranges = nullptr;
};

// Writes the positions of sink and window of each item's query tokens to its lanes, ascending.
// Lanes of empty seats get none.
//
// Errors: those of the launch; cudaErrorInvalidValue when a number is out of range.
KernelStatus ArrangeOwnRows(const ArrangeOwnRowsArgs& args, Stream stream);

struct AppendOwnRowsArgs {
  SeatShape shape;
  const SeatItem* seats = nullptr;
  const OwnItem* items = nullptr;
  const uint32_t* lane_positions = nullptr;  // as ArrangeOwnRows has written them
  size_t lane_stride = 0;
  const uint32_t* lane_counts = nullptr;
  const uint32_t* own_counts = nullptr;
  const std::byte* recent = nullptr;     // [lane, recent_capacity, row], from stored_end on
  uint32_t recent_capacity = 0;          // at least query_position - stored_end of every item
  const std::byte* step_rows = nullptr;  // [kv_head, token_capacity, row], by query tokens
  uint32_t token_capacity = 0;
  size_t row_stride_bytes = 0;
  const std::byte** addresses = nullptr;  // [lane, lane_stride]: of the first lane_counts rows
  uint32_t* row_counts = nullptr;         // [lane], overwritten with own_counts
};

// Writes the addresses of the rows that are not stored behind those of the stored ones.
//
// Errors: as above.
KernelStatus AppendOwnRows(const AppendOwnRowsArgs& args, Stream stream);

}  // namespace pqcached::kernels::cuda

#endif  // PQCACHED_KERNELS_CUDA_STEP_OWN_ROWS_H_

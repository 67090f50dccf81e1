// Positions that an engine gives on the device, in lists or as ranges: copies to lanes, as a
// selection would have left them.
//
// Lists may have any order and may repeat positions; lanes receive ascending positions without
// repetitions, because LocateRows (kernels/cuda/rows.h) removes no duplicates. Lists are read on
// the device only, so an element that is out of range is left out, and noted in page-locked memory
// for the host. Seats and lanes are those of kernels/cuda/step/seats.h.
#ifndef PQCACHED_KERNELS_CUDA_STEP_LISTS_H_
#define PQCACHED_KERNELS_CUDA_STEP_LISTS_H_

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/status.h"
#include "kernels/cuda/step/refused.h"
#include "kernels/cuda/step/seats.h"

namespace pqcached::kernels::cuda {

// Returns the words that a lane's bits need: one bit per token, in multiples of 16 bytes.
constexpr size_t ListBitWords(uint32_t token_capacity) {
  return (size_t{token_capacity} + 127) / 128 * 4;
}

struct ArrangeListsArgs {
  SeatShape shape;
  const SeatItem* seats = nullptr;    // [seat_capacity], in device memory
  const int32_t* lists = nullptr;     // [item, list_count, capacity], in device memory
  const uint32_t* lengths = nullptr;  // [item, list_count]; null: a list ends before its first -1
  uint32_t list_count = 1;            // 1 (one list for all kv heads of an item), or kv_heads
  uint32_t capacity = 0;              // elements of a list
  bool must_ascend = false;     // an element that is not above the one before it is refused, too
  uint32_t token_capacity = 0;  // at least row_end of every seat
  // [lane, ListBitWords(token_capacity)], aligned to 16 bytes: all zero, and zero again afterwards.
  uint32_t* bits = nullptr;
  uint32_t* lane_positions = nullptr;  // [lane, lane_stride], written up to the counts
  size_t lane_stride = 0;              // at least `capacity`
  uint32_t* lane_counts = nullptr;     // [lane], overwritten
  // Negative, or not below row_end of the item's seat; or with must_ascend the order.
  RefusedElement refused_position = {};
  RefusedElement refused_length = {};  // more than `capacity`: the list is read up to that
};

// Copies lists to lanes, ascending and without repetitions. Lanes of empty seats get no positions.
//
// Errors: those of the launch; cudaErrorInvalidValue when a number is out of range.
KernelStatus ArrangeLists(const ArrangeListsArgs& args, Stream stream);

struct ArrangeRangesArgs {
  SeatShape shape;
  const SeatItem* seats = nullptr;   // [seat_capacity], in device memory
  const uint64_t* ranges = nullptr;  // [item, ranges_per_item, 2]: begin and end, in device memory
  uint32_t ranges_per_item = 1;      // ascending and disjoint; empty ones may lie anywhere
  // Of the positions of an item's ranges, in order, the lanes get [first, first + lane_stride).
  uint64_t first = 0;
  uint32_t* lane_positions = nullptr;  // [lane, lane_stride], written up to the counts
  size_t lane_stride = 0;
  uint32_t* lane_counts = nullptr;  // [lane], overwritten
  RefusedElement refused_range =
      {};  // begins behind its end, or ends beyond row_end: it is skipped
};

// Copies a part of the positions of each item's ranges to its lanes. Lanes of empty seats get no
// positions.
//
// Errors: as above.
KernelStatus ArrangeRanges(const ArrangeRangesArgs& args, Stream stream);

}  // namespace pqcached::kernels::cuda

#endif  // PQCACHED_KERNELS_CUDA_STEP_LISTS_H_

// Copies between an engine's tensors, packed by the items of a step, and tensors ordered by lanes:
// queries to lanes, results back.
//
// A *seat* is the place of one sequence across steps; its lanes are [seat * kv_heads, (seat + 1) *
// kv_heads). A table in device memory maps each seat to its query tokens in this step, so that
// items may be in any order while the launches stay the same. Query head h belongs to kv head h /
// group_size.
#ifndef PQCACHED_KERNELS_CUDA_STEP_SEATS_H_
#define PQCACHED_KERNELS_CUDA_STEP_SEATS_H_

#include <cstddef>
#include <cstdint>

#include "kernels/base/dtype.h"
#include "kernels/cuda/status.h"

namespace pqcached::kernels::cuda {

inline constexpr uint32_t kEmptySeat = 0xFFFFFFFFu;

struct SeatItem {
  uint32_t item = kEmptySeat;  // index in the step; kEmptySeat: the seat is unused
  uint32_t query_begin = 0;    // its first query token in packed tensors
  uint32_t row_end = 0;        // rows of positions below it may be read in this step
};

struct SeatShape {
  uint32_t seat_capacity = 0;
  uint32_t kv_heads = 0;      // seat_capacity * kv_heads at most 65535
  uint32_t group_size = 1;    // G
  uint32_t query_length = 1;  // L, of every item
};

struct ArrangeQueriesArgs {
  SeatShape shape;
  const SeatItem* seats = nullptr;  // [seat_capacity], in device memory
  uint32_t key_dim = 0;
  DType dtype = DType::kF16;
  const std::byte* queries = nullptr;  // [tokens, kv_heads * G, key_dim], aligned for its type
  int64_t token_stride = 0;            // in elements
  int64_t head_stride = 0;
  int64_t dim_stride = 1;
  float* lane_queries = nullptr;  // [lane, L, G, key_dim]; entries of empty seats stay unchanged
};

// Copies queries to lanes.
// Errors: those of the launch; cudaErrorInvalidValue when a number is out of range.
KernelStatus ArrangeQueries(const ArrangeQueriesArgs& args, Stream stream);

struct ArrangeOutputsArgs {
  SeatShape shape;
  const SeatItem* seats = nullptr;
  uint32_t value_dim = 0;
  const float* lane_output = nullptr;  // [lane, L, G, value_dim]
  const float* lane_lse = nullptr;     // [lane, L, G]
  float* output = nullptr;             // [tokens, kv_heads * G, value_dim]
  float* lse = nullptr;                // [tokens, kv_heads * G]; null: not wanted
};

// Copies outputs and lse from lanes to the engine's tensors. Errors: as above.
KernelStatus ArrangeOutputs(const ArrangeOutputsArgs& args, Stream stream);

struct ArrangePositionsArgs {
  SeatShape shape;
  const SeatItem* seats = nullptr;
  const uint32_t* lane_positions = nullptr;  // [lane, lane_stride]
  size_t lane_stride = 0;
  const uint32_t* lane_counts = nullptr;  // [lane]
  // An item may have several lists, of which this call writes one: lists of its query tokens.
  uint32_t lists_per_item = 1;
  uint32_t list = 0;              // below lists_per_item
  uint32_t* positions = nullptr;  // [item, lists_per_item, kv_heads, stride], written up to counts
  size_t stride = 0;              // at least the largest count
  uint32_t* counts = nullptr;     // [item, lists_per_item, kv_heads]
};

// Copies selected positions and counts from lanes to the engine's tensors. Errors: as above.
KernelStatus ArrangePositions(const ArrangePositionsArgs& args, Stream stream);

}  // namespace pqcached::kernels::cuda

#endif  // PQCACHED_KERNELS_CUDA_STEP_SEATS_H_

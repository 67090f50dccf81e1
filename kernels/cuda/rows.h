// Rows on the device: the addresses of selected tokens' rows (in the block cache or in page-locked
// host memory), and copies of rows.
//
// A lane is one sequence under one kv head, as in kernels/cuda/select/select.h. Its rows are stored
// in *spans* of the page-locked mapping; *blocks* of kBlockSlots consecutive slots of a span may
// also be in a block cache in device memory. LocateRows converts positions to addresses; the
// kernels that follow take addresses and need not know which memory they are in.
#ifndef PQCACHED_KERNELS_CUDA_ROWS_H_
#define PQCACHED_KERNELS_CUDA_ROWS_H_

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/status.h"

namespace pqcached::kernels::cuda {

inline constexpr uint32_t kBlockSlots = 128;
inline constexpr uint32_t kNotResident = 0xFFFFFFFFu;

// Tokens [first_position, first_position + token_count) of one lane.
struct DeviceRowSpan {
  const std::byte* rows = nullptr;  // row of token first_position; aligned to 16 bytes
  uint32_t token_count = 0;
  uint32_t first_position = 0;
  uint32_t first_block = 0;  // index in the lane: slot s of the span is in block first_block +
                             // s / kBlockSlots
  // Non-zero: `rows` is a host address that the device cannot read. LocateRows lists such rows, and
  // block caches do not load them.
  uint32_t host_only = 0;
};

// A range of positions that is attended to without being selected (sink tokens, local window).
struct PositionRange {
  uint32_t begin = 0;
  uint32_t end = 0;
};

struct RowLane {
  uint32_t span_begin = 0;  // ascending, without overlap: spans [span_begin, span_end)
  uint32_t span_end = 0;
  PositionRange before = {};  // positions whose rows precede the selected ones
  PositionRange after = {};   // positions whose rows follow the selected ones
};

// Residency of a block cache; all pointers are null when there is no cache.
struct BlockResidency {
  uint32_t block_capacity = 0;             // blocks per lane
  const uint32_t* cache_slots = nullptr;   // [lane, block_capacity]: kNotResident, or the slot
  uint32_t slot_capacity = 0;              // cache slots per lane
  const std::byte* cached_rows = nullptr;  // [lane, slot_capacity, kBlockSlots, row_stride_bytes]
  uint32_t* touches = nullptr;             // [lane, block_capacity], incremented: rows requested
  unsigned long long* hits = nullptr;      // one counter, incremented: rows found in the cache
  unsigned long long* misses = nullptr;    // one counter, incremented: rows not found in it
};

struct LocateRowsArgs {
  uint32_t lane_capacity = 0;            // at most 65535
  const RowLane* lanes = nullptr;        // [lane_capacity], in device memory
  const DeviceRowSpan* spans = nullptr;  // spans of all lanes, in device memory
  size_t row_stride_bytes = 0;           // a multiple of 16
  const uint32_t* positions = nullptr;   // [lane, position_stride], each inside a span
  size_t position_stride = 0;
  const uint32_t* counts = nullptr;  // [lane]: number of selected positions
  BlockResidency residency = {};
  const std::byte** addresses = nullptr;  // [lane, address_stride], overwritten
  size_t address_stride = 0;              // rows of the largest lane: before + selected + after
  uint32_t* row_counts = nullptr;         // [lane], overwritten
  // When not null, [lane, address_stride] and [lane] (incremented): the indices of entries of
  // `addresses` whose rows are not in the cache and lie in spans that only the host can read, in no
  // particular order. Input of StageRows.
  uint32_t* missed_rows = nullptr;
  uint32_t* missed_counts = nullptr;
};

// Writes the addresses of the rows of `before`, of the selected positions and of `after`. Positions
// that no span contains (gaps in a range) are omitted. Ranges and positions must not overlap,
// because duplicates are not removed. A lane with more rows than address_stride keeps the first
// ones.
//
// Errors: those of the launch; cudaErrorInvalidValue when a size is out of range.
KernelStatus LocateRows(const LocateRowsArgs& args, Stream stream);

struct StageRowsArgs {
  uint32_t lane_capacity = 0;             // at most 65535
  const std::byte** addresses = nullptr;  // [lane, address_stride], as written by LocateRows
  size_t address_stride = 0;
  const uint32_t* missed_rows = nullptr;  // [lane, address_stride]
  uint32_t* missed_counts = nullptr;      // [lane], cleared
  // Output in page-locked memory: the source addresses of the rows that the host must copy, and
  // their number per lane.
  const std::byte** sources = nullptr;  // [lane, address_stride], overwritten
  uint32_t* source_counts = nullptr;    // [lane], overwritten
  const std::byte* staging = nullptr;   // [lane, address_stride, row_stride_bytes], page-locked
  size_t row_stride_bytes = 0;
};

// Writes the addresses of missed rows to `sources`, so that the host can copy the rows to `staging`
// in the same order, and replaces these entries of `addresses` by the addresses in `staging`.
//
// Errors: as above.
KernelStatus StageRows(const StageRowsArgs& args, Stream stream);

struct GatherRowsArgs {
  uint32_t lane_capacity = 0;                   // at most 65535
  const std::byte* const* addresses = nullptr;  // [lane, address_stride]
  size_t address_stride = 0;
  const uint32_t* row_counts = nullptr;  // [lane]
  size_t part_begin_bytes = 0;           // as in kernels/rows/gather.h; both are multiples of 16
  size_t part_bytes = 0;
  std::byte* target = nullptr;     // [lane, address_stride, target_stride_bytes], aligned to 16
  size_t target_stride_bytes = 0;  // >= part_bytes, a multiple of 16
};

// Sets target[lane, i] = part of the row at addresses[lane, i]. Page-locked host memory is read in
// place (zero-copy).
//
// Errors: as above.
KernelStatus GatherRows(const GatherRowsArgs& args, Stream stream);

}  // namespace pqcached::kernels::cuda

#endif  // PQCACHED_KERNELS_CUDA_ROWS_H_

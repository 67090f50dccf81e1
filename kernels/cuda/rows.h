// Rows on the device: where selected tokens lie (in the block cache, or in page-locked host memory),
// and copies of them.
//
// A lane is one sequence under one kv head, as in kernels/cuda/select.h. Its rows lie in *spans* of the
// page-locked mapping; *blocks* of kBlockSlots consecutive slots of a span may also lie in a block
// cache in device memory. LocateRows turns positions into addresses; what comes after takes addresses
// and does not care which memory they are in.
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
  const std::byte* rows = nullptr;  // of token first_position; aligned to 16 bytes
  uint32_t token_count = 0;
  uint32_t first_position = 0;
  uint32_t first_block = 0;  // of the lane's blocks: slot s of the span is in block first_block +
                             // s / kBlockSlots
  // Not 0: `rows` is an address of the host that the device cannot read. LocateRows lists such rows,
  // and no block cache loads them.
  uint32_t host_only = 0;
};

// A range of positions that is attended without being selected (sink, window).
struct PositionRange {
  uint32_t begin = 0;
  uint32_t end = 0;
};

struct RowLane {
  uint32_t span_begin = 0;  // ascending, without overlap: spans [span_begin, span_end)
  uint32_t span_end = 0;
  PositionRange before = {};  // rows that come before the selected ones
  PositionRange after = {};   // and behind them
};

// Where blocks lie in a cache; null pointers: there is none.
struct BlockResidency {
  uint32_t block_capacity = 0;             // of one lane
  const uint32_t* cache_slots = nullptr;   // [lane, block_capacity]: kNotResident, or the slot
  uint32_t slot_capacity = 0;              // cache slots of one lane
  const std::byte* cached_rows = nullptr;  // [lane, slot_capacity, kBlockSlots, row_stride_bytes]
  uint32_t* touches = nullptr;             // [lane, block_capacity], added to: rows asked for
  unsigned long long* hits = nullptr;      // one number, added to: rows found in the cache
  unsigned long long* misses = nullptr;    // likewise
};

struct LocateRowsArgs {
  uint32_t lane_capacity = 0;            // at most 65535
  const RowLane* lanes = nullptr;        // [lane_capacity], in device memory
  const DeviceRowSpan* spans = nullptr;  // of all lanes, in device memory
  size_t row_stride_bytes = 0;           // a multiple of 16
  const uint32_t* positions = nullptr;   // [lane, position_stride], each inside a span
  size_t position_stride = 0;
  const uint32_t* counts = nullptr;  // [lane]: positions selected
  BlockResidency residency = {};
  const std::byte** addresses = nullptr;  // [lane, address_stride], overwritten
  size_t address_stride = 0;              // rows of the largest lane: before + selected + after
  uint32_t* row_counts = nullptr;         // [lane], overwritten
  // When not null, [lane, address_stride] and [lane] (added to): which entries of `addresses` are
  // rows of spans that only the host can read, and not in the cache, in no particular order. For
  // StageRows.
  uint32_t* missed_rows = nullptr;
  uint32_t* missed_counts = nullptr;
};

// Writes the addresses of the rows of `before`, of the selected positions and of `after`; positions
// that no span holds (gaps in a range) are left out of ranges. Ranges and positions must not overlap:
// nothing is looked up twice. A lane with more rows than address_stride keeps the first ones.
//
// Errors: those of the launch; cudaErrorInvalidValue when a size is out of range.
KernelStatus LocateRows(const LocateRowsArgs& args, Stream stream);

struct StageRowsArgs {
  uint32_t lane_capacity = 0;             // at most 65535
  const std::byte** addresses = nullptr;  // [lane, address_stride], as LocateRows left them
  size_t address_stride = 0;
  const uint32_t* missed_rows = nullptr;  // [lane, address_stride]
  uint32_t* missed_counts = nullptr;      // [lane], cleared
  // In page-locked memory: which rows the host is to bring, and how many.
  const std::byte** sources = nullptr;  // [lane, address_stride], overwritten
  uint32_t* source_counts = nullptr;    // [lane], overwritten
  const std::byte* staging = nullptr;   // [lane, address_stride, row_stride_bytes], page-locked
  size_t row_stride_bytes = 0;
};

// Writes the addresses of missed rows to `sources`, for the host to copy them to `staging` in the
// same order, and turns these entries of `addresses` to where they will be.
//
// Errors: as above.
KernelStatus StageRows(const StageRowsArgs& args, Stream stream);

struct GatherRowsArgs {
  uint32_t lane_capacity = 0;                   // at most 65535
  const std::byte* const* addresses = nullptr;  // [lane, address_stride]
  size_t address_stride = 0;
  const uint32_t* row_counts = nullptr;  // [lane]
  size_t part_begin_bytes = 0;           // as in kernels/gather.h; both multiples of 16
  size_t part_bytes = 0;
  std::byte* target = nullptr;     // [lane, address_stride, target_stride_bytes], aligned to 16
  size_t target_stride_bytes = 0;  // >= part_bytes, a multiple of 16
};

// Sets target[lane, i] = part of the row at addresses[lane, i]. Reads page-locked host memory where it
// lies (zero-copy).
//
// Errors: as above.
KernelStatus GatherRows(const GatherRowsArgs& args, Stream stream);

}  // namespace pqcached::kernels::cuda

#endif  // PQCACHED_KERNELS_CUDA_ROWS_H_

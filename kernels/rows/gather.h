// Gather copies rows, selected by token position, into one contiguous buffer.
//
// Stateless; thread-safe as long as targets are not shared.
#ifndef PQCACHED_KERNELS_ROWS_GATHER_H_
#define PQCACHED_KERNELS_ROWS_GATHER_H_

#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/base/exec.h"
#include "kernels/base/row_span.h"

namespace pqcached::kernels {

// Arguments for copying bytes [part_begin_bytes, part_begin_bytes + part_bytes) of each row. With k
// = key_dim * element bytes and v = value_dim * element bytes, the whole row is {0, k + v}, the key
// {0, k} and the value {k, v}.
struct GatherArgs {
  size_t row_stride_bytes = 0;
  size_t part_begin_bytes = 0;
  size_t part_bytes = 0;                // part_begin_bytes + part_bytes <= row_stride_bytes
  std::span<const RowSpan> spans;       // ascending positions
  std::span<const uint32_t> positions;  // ascending, each inside a span
  size_t target_stride_bytes = 0;       // >= part_bytes
  std::span<std::byte>
      target;  // [positions.size(), target_stride_bytes]; the last row may be short; any alignment
};

// Sets target[i] = part of the row of positions[i]. Bytes between part_bytes and the stride stay
// unchanged. Source and target must not overlap.
void GatherRows(const Exec& exec, const GatherArgs& args);

}  // namespace pqcached::kernels

#endif  // PQCACHED_KERNELS_ROWS_GATHER_H_

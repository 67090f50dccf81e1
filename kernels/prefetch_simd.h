// Prefetcher: brings the rows of the next block into L2 while a block is worked on.
//
// Include after one of simd_*.h; everything is local to the including file.
#ifndef PQCACHED_KERNELS_PREFETCH_SIMD_H_
#define PQCACHED_KERNELS_PREFETCH_SIMD_H_

#include <cstddef>
#include <cstdint>

#include "kernels/attend_internal.h"

namespace pqcached::kernels {
namespace {

using internal::kBlockRows;

// Prefetches the rows of a block a bit at a time, two lines of one row, then two of the next:
// column by column, as gather_simd.h explains.
struct Prefetcher {
  static constexpr uint32_t kColumnBytes = 128;

  const std::byte* const* rows;  // [kBlockRows]
  uint32_t row = 0;
  uint32_t offset = 0;

  // The next `pieces` of the order.
  [[gnu::always_inline]] inline void Advance(uint32_t pieces) {
    while (pieces > 0) {
      const uint32_t left = kBlockRows - row;
      const uint32_t run = pieces < left ? pieces : left;
      for (uint32_t i = row; i < row + run; ++i) {
        Vec::Prefetch(rows[i] + offset);
        Vec::Prefetch(rows[i] + offset + 64);
      }
      pieces -= run;
      row += run;
      if (row == kBlockRows) {
        row = 0;
        offset += kColumnBytes;
      }
    }
  }

  // How many pieces per row make `bytes` of all rows.
  static constexpr uint32_t Columns(uint32_t bytes) {
    return (bytes + kColumnBytes - 1) / kColumnBytes;
  }
};

}  // namespace
}  // namespace pqcached::kernels

#endif  // PQCACHED_KERNELS_PREFETCH_SIMD_H_

// Prefetcher loads the rows of the next block into L2 during the work on the current block.
//
// Include after one of simd_*.h; everything is local to the including file.
#ifndef PQCACHED_KERNELS_ATTEND_PREFETCH_SIMD_H_
#define PQCACHED_KERNELS_ATTEND_PREFETCH_SIMD_H_

#include <cstddef>
#include <cstdint>

#include "kernels/attend/attend_internal.h"

namespace pqcached::kernels {
namespace {

using internal::kBlockRows;

// Prefetches the rows of a block in small pieces, two lines of one row and then two of the next:
// column by column, as gather_simd.h explains.
struct Prefetcher {
  static constexpr uint32_t kColumnBytes = 128;
  static constexpr uint32_t kNoEnd = ~0u;

  const std::byte* const* rows;  // [kBlockRows]
  uint32_t row = 0;
  uint32_t offset = 0;
  // Columns from key_end on lie `jump` bytes behind their offset: values in another array.
  uint32_t key_end = kNoEnd;
  ptrdiff_t jump = 0;

  // Prefetches the next `pieces` pieces.
  [[gnu::always_inline]] inline void Advance(uint32_t pieces) {
    while (pieces > 0) {
      const uint32_t left = kBlockRows - row;
      const uint32_t run = pieces < left ? pieces : left;
      const ptrdiff_t from = offset < key_end ? offset : offset + jump;
      for (uint32_t i = row; i < row + run; ++i) {
        Vec::Prefetch(rows[i] + from);
        Vec::Prefetch(rows[i] + from + 64);
      }
      pieces -= run;
      row += run;
      if (row == kBlockRows) {
        row = 0;
        offset += kColumnBytes;
      }
    }
  }

  // Returns the number of pieces per row that cover `bytes` of all rows.
  static constexpr uint32_t Columns(uint32_t bytes) {
    return (bytes + kColumnBytes - 1) / kColumnBytes;
  }
};

}  // namespace
}  // namespace pqcached::kernels

#endif  // PQCACHED_KERNELS_ATTEND_PREFETCH_SIMD_H_

// StreamRows copies rows at some stride to packed memory, bypassing the caches, because another
// core or a device reads the copy next.
//
// Stateless; thread-safe as long as targets are not shared.
#ifndef PQCACHED_KERNELS_BASE_STREAM_H_
#define PQCACHED_KERNELS_BASE_STREAM_H_

#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/base/exec.h"

namespace pqcached::kernels {

struct StreamArgs {
  const std::byte* rows = nullptr;  // first row; any alignment
  ptrdiff_t row_stride_bytes = 0;   // may be negative or 0
  size_t row_bytes = 0;
  size_t row_count = 0;
  std::span<std::byte> target;  // row_count * row_bytes; any alignment, whole cache lines are fast
};

// Copies the rows and fences before it returns. Source and target must not overlap.
void StreamRows(const Exec& exec, const StreamArgs& args);

}  // namespace pqcached::kernels

#endif  // PQCACHED_KERNELS_BASE_STREAM_H_

// Strided copies that bypass the caches, written once for every Vec.
//
// Include after one of simd_*.h; everything is local to the including file.
#ifndef PQCACHED_KERNELS_BASE_STREAM_SIMD_H_
#define PQCACHED_KERNELS_BASE_STREAM_SIMD_H_

#include <cstddef>
#include <cstdint>

#include "kernels/base/simd/copy_simd.h"
#include "kernels/base/stream_internal.h"

namespace pqcached::kernels {
namespace {

inline void StreamRowsOf(const internal::StreamCall& call) {
  const auto row_stride = static_cast<ptrdiff_t>(call.row_bytes);
  if (row_stride == call.source_stride_bytes && call.row_bytes == call.target_stride_bytes) {
    StreamBytes(call.target, call.source, call.row_bytes * call.row_count);
    return;
  }
  for (size_t i = 0; i < call.row_count; ++i) {
    StreamBytes(call.target + i * call.target_stride_bytes,
                call.source + static_cast<ptrdiff_t>(i) * call.source_stride_bytes, call.row_bytes);
  }
}

}  // namespace
}  // namespace pqcached::kernels

#endif  // PQCACHED_KERNELS_BASE_STREAM_SIMD_H_

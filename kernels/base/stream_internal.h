// Strided copies that bypass the caches, shared by the ingest copy and stream.cc. Private to
// kernels.
#ifndef PQCACHED_KERNELS_BASE_STREAM_INTERNAL_H_
#define PQCACHED_KERNELS_BASE_STREAM_INTERNAL_H_

#include <cstddef>
#include <cstdint>

namespace pqcached::kernels::internal {

struct StreamCall {
  const std::byte* source;
  ptrdiff_t source_stride_bytes;
  size_t row_bytes;
  size_t row_count;
  std::byte* target;
  size_t target_stride_bytes;
};

// FenceStreams makes the copied bytes visible before later stores.
void StreamRowsAvx2(const StreamCall& call);
void StreamRowsAvx512(const StreamCall& call);
void FenceStreamsAvx2();
void FenceStreamsAvx512();

}  // namespace pqcached::kernels::internal

#endif  // PQCACHED_KERNELS_BASE_STREAM_INTERNAL_H_

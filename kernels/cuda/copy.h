// CopyRanges copies byte ranges that a table in device memory lists, from page-locked host memory
// or any memory that the device can read, to device memory.
//
// cudaMemcpyAsync would need one call per range. Here the ranges may change from step to step while
// the launch stays the same, as a captured graph requires.
#ifndef PQCACHED_KERNELS_CUDA_COPY_H_
#define PQCACHED_KERNELS_CUDA_COPY_H_

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/status.h"

namespace pqcached::kernels::cuda {

struct ByteRange {
  const std::byte* from = nullptr;
  std::byte* to = nullptr;
  uint64_t size_bytes = 0;  // 0: unused
};

struct CopyRangesArgs {
  uint32_t range_capacity = 0;        // at most 65535
  uint32_t blocks_per_range = 8;      // 1..1024: thread blocks per range
  const ByteRange* ranges = nullptr;  // [range_capacity], in device memory; not overlapping
};

// Copies all ranges; one launch. Ranges whose source and target have the same offset from a
// multiple of 16 bytes are copied fastest.
//
// Errors: those of the launch; cudaErrorInvalidValue when a number is out of range.
KernelStatus CopyRanges(const CopyRangesArgs& args, Stream stream);

}  // namespace pqcached::kernels::cuda

#endif  // PQCACHED_KERNELS_CUDA_COPY_H_

// CopyRanges: pieces of bytes that a table in device memory names, from page-locked host memory or from
// wherever the device reads, to device memory.
//
// What cudaMemcpyAsync does one piece a call, but with numbers that change from step to step under a
// launch that stays the same.
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
  uint32_t blocks_per_range = 8;      // 1..1024: so many thread blocks share a range
  const ByteRange* ranges = nullptr;  // [range_capacity], in device memory; without overlap
};

// Copies all ranges; one launch. Ranges whose ends are as far from multiples of 16 as each other
// are copied fastest.
//
// Errors: those of the launch; cudaErrorInvalidValue when a number is out of range.
KernelStatus CopyRanges(const CopyRangesArgs& args, Stream stream);

}  // namespace pqcached::kernels::cuda

#endif  // PQCACHED_KERNELS_CUDA_COPY_H_

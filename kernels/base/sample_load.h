// LoadSamples copies rows of any dtype and stride to compact samples, for k-means, encoding and
// maps.
//
// Included by kmeans.cc, pq_encode.cc and rotate.cc only.
#ifndef PQCACHED_KERNELS_BASE_SAMPLE_LOAD_H_
#define PQCACHED_KERNELS_BASE_SAMPLE_LOAD_H_

#include <cstddef>
#include <cstdint>

#include "kernels/base/dtype.h"
#include "kernels/base/exec.h"

namespace pqcached::kernels {

struct SampleLoadArgs {
  DType source_type = DType::kF32;
  const std::byte* rows = nullptr;  // any alignment
  size_t row_stride = 0;            // bytes
  uint32_t row_count = 0;
  uint32_t dim = 0;
  // Bytes from the first half of a row's numbers to the second half; 0: a row is contiguous.
  size_t pair_offset_bytes = 0;
  DType sample_type = DType::kF32;  // fp32 or bf16
  std::byte* samples = nullptr;     // [row_count, dim] of sample_type, any alignment
};

// Converts like ConvertElements: the same bits on every instruction set, NaN payloads excepted.
void LoadSamples(const Exec& exec, const SampleLoadArgs& args);

}  // namespace pqcached::kernels

#endif  // PQCACHED_KERNELS_BASE_SAMPLE_LOAD_H_

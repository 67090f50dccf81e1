// LoadSamples: rows of any dtype and stride made compact, for k-means and encoding.
//
// Shared by kmeans.cc and pq_encode.cc; nobody else includes it.
#ifndef PQCACHED_KERNELS_SAMPLE_LOAD_H_
#define PQCACHED_KERNELS_SAMPLE_LOAD_H_

#include <cstddef>
#include <cstdint>

#include "kernels/dtype.h"
#include "kernels/exec.h"

namespace pqcached::kernels {

struct SampleLoadArgs {
  DType source_type = DType::kF32;
  const std::byte* rows = nullptr;  // any alignment
  size_t row_stride = 0;            // bytes
  uint32_t row_count = 0;
  uint32_t dim = 0;
  DType sample_type = DType::kF32;  // fp32 or bf16
  std::byte* samples = nullptr;     // [row_count, dim] of sample_type, any alignment
};

// Gives the bits of ConvertElements (NaN payloads excepted) at every level.
void LoadSamples(const Exec& exec, const SampleLoadArgs& args);

}  // namespace pqcached::kernels

#endif  // PQCACHED_KERNELS_SAMPLE_LOAD_H_

// MergeTensors merges one partial attention into another, in the memory and layouts of an engine.
//
// kernels/attend/merge.h specifies the result. MergePartials of attend.h merges contiguous floats.
#ifndef PQCACHED_KERNELS_CUDA_MERGE_H_
#define PQCACHED_KERNELS_CUDA_MERGE_H_

#include <cstddef>
#include <cstdint>

#include "kernels/base/dtype.h"
#include "kernels/cuda/status.h"

namespace pqcached::kernels::cuda {

// A partial attention: output [tokens, heads, dim] and lse [tokens, heads]. Pointers are to the
// elements with index 0 in every dimension, aligned for their types; strides are in elements, and
// may be negative.
struct PartialTensors {
  std::byte* output = nullptr;
  std::byte* lse = nullptr;
  DType output_dtype = DType::kF32;
  DType lse_dtype = DType::kF32;
  bool lse_is_base2 = false;  // log2 of the sum of exponentials; otherwise the natural logarithm
  int64_t output_strides[3] = {};
  int64_t lse_strides[2] = {};
};

struct MergeTensorsArgs {
  uint32_t token_count = 0;
  uint32_t head_count = 0;
  uint32_t dim = 0;
  PartialTensors a;  // read and overwritten; its elements have places of their own
  PartialTensors b;
  // Natural logit of one more term of each head's softmax, without a value, [heads]; null: none.
  const std::byte* sink_logits = nullptr;
  DType sink_dtype = DType::kF32;
  int64_t sink_stride = 0;  // in elements
};

// Merges b into a. Computes in fp32; results are rounded to the types of a. A part with lse
// -infinity does not count, and its output is not read; where no part counts, output is 0 and lse
// -infinity.
//
// Errors: those of the launch
KernelStatus MergeTensors(const MergeTensorsArgs& args, Stream stream);

}  // namespace pqcached::kernels::cuda

#endif  // PQCACHED_KERNELS_CUDA_MERGE_H_

// Selection by the values of all tokens: ScoreSelect, and PqSelect without cells.
//
// Included by the files of these two functions only.
#ifndef PQCACHED_KERNELS_CUDA_SELECT_VALUE_SELECT_CUH_
#define PQCACHED_KERNELS_CUDA_SELECT_VALUE_SELECT_CUH_

#include "kernels/cuda/select/select.h"

namespace pqcached::kernels::cuda {

struct ValueSelectArgs {
  uint32_t group_size = 0;
  GroupRule rule = GroupRule::kSumSoftmax;
  SelectTables candidates;
  PqGeometry geometry;            // used when `tables` is not null
  const float* tables = nullptr;  // null: logits are given by the chunks
  Selection selection;
  float* lse = nullptr;
  void* scratch = nullptr;  // ScoreSelectScratchBytes
};

KernelStatus SelectByValues(const ValueSelectArgs& args, Stream stream);

}  // namespace pqcached::kernels::cuda

#endif  // PQCACHED_KERNELS_CUDA_SELECT_VALUE_SELECT_CUH_

// Notes refused elements (kernels/cuda/step/refused.h) on the device.
#ifndef PQCACHED_KERNELS_CUDA_STEP_REFUSED_CUH_
#define PQCACHED_KERNELS_CUDA_STEP_REFUSED_CUH_

#include <cuda_runtime.h>

#include <cstddef>

#include "kernels/cuda/step/refused.h"

namespace pqcached::kernels::cuda {

__device__ inline void Refuse(const RefusedElement& refused, size_t element) {
  if (refused.noted == nullptr) return;
  *refused.noted = (static_cast<unsigned long long>(refused.tag) << kRefusedTagShift) + element + 1;
}

}  // namespace pqcached::kernels::cuda

#endif  // PQCACHED_KERNELS_CUDA_STEP_REFUSED_CUH_

// Where kernels note an element of an argument that they refuse: arguments in device memory are
// read on the device only, and the host reports the element after the work is done.
#ifndef PQCACHED_KERNELS_CUDA_STEP_REFUSED_H_
#define PQCACHED_KERNELS_CUDA_STEP_REFUSED_H_

#include <cstdint>

namespace pqcached::kernels::cuda {

// Where kernels note a refused element: index + 1 of one such element of the array, plus `tag` <<
// kRefusedTagShift. Stays unchanged when no element is refused.
struct RefusedElement {
  unsigned long long* noted = nullptr;  // page-locked memory that the device may write, or null
  uint32_t tag = 0;                     // below 2^16
};
inline constexpr uint32_t kRefusedTagShift = 48;

}  // namespace pqcached::kernels::cuda

#endif  // PQCACHED_KERNELS_CUDA_STEP_REFUSED_H_

#include "tests/tinylm/kernels.h"

namespace tinylm {

const Kernels& BestKernels() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f")) return Avx512Kernels();
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return Avx2Kernels();
#endif
  return PortableKernels();
}

}  // namespace tinylm

/* The example of tensor.h, compiled as C99. */
#include "pqcached/client.h"

pqc_tensor tensor_h_example(void* data);

// clang-format off
pqc_tensor tensor_h_example(void* data) {
  // [example]
  static const uint64_t shape[] = {4096, 8, 128};
  pqc_tensor keys = PQC_INIT(pqc_tensor);
  keys.ptr = data;
  keys.dtype = PQC_F16;
  keys.ndim = 3;
  keys.shape = shape;
  // [/example]
  return keys;
}
// clang-format on

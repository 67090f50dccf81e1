#ifndef PQCACHED_TESTS_TINYLM_CLIENT_CALLS_H_
#define PQCACHED_TESTS_TINYLM_CLIENT_CALLS_H_

// Shorthands for calls of the client.

#include <pqcached/client.h>

#include <stdexcept>
#include <string>

namespace tinylm {

// Returns a struct of the client with its first field, the size, filled in.
template <typename T>
T Sized() {
  T value{};
  value.struct_size = sizeof(T);
  return value;
}

// Throws std::runtime_error with the client's message.
inline void Check(pqc_status status, const char* call) {
  if (status == PQC_OK) return;
  throw std::runtime_error(std::string(call) + ": " + pqc_status_name(status) + ": " +
                           pqc_last_error());
}

// Returns a borrowed contiguous fp32 array. The client only reads it, although the pointer's type
// is not const.
inline pqc_tensor Borrow(const float* data, const uint64_t (&shape)[3]) {
  auto tensor = Sized<pqc_tensor>();
  tensor.ptr = const_cast<float*>(data);
  tensor.device = PQC_CPU;
  tensor.dtype = PQC_F32;
  tensor.ndim = 3;
  tensor.shape = shape;
  return tensor;
}

}  // namespace tinylm

#endif  // PQCACHED_TESTS_TINYLM_CLIENT_CALLS_H_

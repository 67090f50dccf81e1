// Controls of the emulated device, for tests of what goes wrong.
//
// Thread-safe.
#ifndef PQCACHED_TESTS_GPU_EMULATION_EMULATION_H_
#define PQCACHED_TESTS_GPU_EMULATION_EMULATION_H_

#include <cuda_runtime.h>

namespace pqcached::emulation {

// The `after`-th next call of the runtime function of that name fails with `error` (0: the next
// one).
void FailCall(const char* name, cudaError_t error, int after = 0);

// What the runtime answers about devices until Reset().
struct Machine {
  cudaError_t count_error = cudaSuccess;
  int device_count = 1;
  int compute_major = 9;
  int compute_minor = 0;
  int driver_version = 13000;
  bool registers_read_only = true;
};
void SetMachine(const Machine& machine);

// The machine and the calls that should fail as at the start.
void Reset();

}  // namespace pqcached::emulation

#endif  // PQCACHED_TESTS_GPU_EMULATION_EMULATION_H_

// Memory and streams of the emulated device for whoever loads libpqcached_gpu_emulated without CUDA's runtime: Python's tests.
#include <cuda_runtime.h>

#include <cstddef>

#define PQC_EXPORTED extern "C" __attribute__((visibility("default")))

// Null when there is none.
PQC_EXPORTED void* pqcached_emulated_allocate(size_t size_bytes) {
  void* memory = nullptr;
  return cudaMalloc(&memory, size_bytes) == cudaSuccess ? memory : nullptr;
}

PQC_EXPORTED void pqcached_emulated_free(void* memory) { (void)cudaFree(memory); }

// After all work that streams were given.
PQC_EXPORTED void pqcached_emulated_copy(void* to, const void* from, size_t size_bytes) {
  (void)cudaMemcpy(to, from, size_bytes, cudaMemcpyDefault);
}

PQC_EXPORTED void* pqcached_emulated_stream() {
  cudaStream_t stream = nullptr;
  return cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess ? stream
                                                                                  : nullptr;
}

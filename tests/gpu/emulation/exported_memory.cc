// Exports memory and streams of the emulated device from libpqcached_gpu_emulated, which Python's
// tests load without CUDA's runtime.
#include <cuda_runtime.h>

#include <cstddef>

#define PQC_EXPORTED extern "C" __attribute__((visibility("default")))

// Returns null when there is none.
PQC_EXPORTED void* pqcached_emulated_allocate(size_t size_bytes) {
  void* memory = nullptr;
  return cudaMalloc(&memory, size_bytes) == cudaSuccess ? memory : nullptr;
}

PQC_EXPORTED void pqcached_emulated_free(void* memory) { (void)cudaFree(memory); }

// Copies after all work of all streams.
PQC_EXPORTED void pqcached_emulated_copy(void* to, const void* from, size_t size_bytes) {
  (void)cudaMemcpy(to, from, size_bytes, cudaMemcpyDefault);
}

PQC_EXPORTED void* pqcached_emulated_stream() {
  cudaStream_t stream = nullptr;
  return cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess ? stream
                                                                                  : nullptr;
}

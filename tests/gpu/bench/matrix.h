// Matrix products in fp16 for the model around attention: cuBLAS, or plain loops on the emulation.
#ifndef PQCACHED_TESTS_GPU_BENCH_MATRIX_H_
#define PQCACHED_TESTS_GPU_BENCH_MATRIX_H_

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <memory>

namespace pqcached::bench {

struct Product {
  const std::byte* x = nullptr;       // [row_count, in] fp16
  const std::byte* weight = nullptr;  // [out, in] fp16
  std::byte* y = nullptr;             // [row_count, out] fp16
  uint32_t row_count = 0;
  uint32_t in = 0;
  uint32_t out = 0;
  bool adds = false;  // y += x weight^T, else y =
};

class Matrix {
 public:
  // Throws Absent without cuBLAS.
  Matrix();
  ~Matrix();
  Matrix(const Matrix&) = delete;
  Matrix& operator=(const Matrix&) = delete;

  void Give(cudaStream_t stream, const Product& product);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace pqcached::bench

#endif  // PQCACHED_TESTS_GPU_BENCH_MATRIX_H_

#include <cublas_v2.h>

#include "tests/gpu/bench/bench.h"
#include "tests/gpu/bench/matrix.h"

namespace pqcached::bench {
namespace {

constexpr size_t kWorkspaceBytes = size_t{32} << 20;

void CheckBlas(cublasStatus_t status, const char* what) {
  if (status != CUBLAS_STATUS_SUCCESS) {
    throw Absent(std::string("cuBLAS, ") + what + ": " + cublasGetStatusString(status));
  }
}

}  // namespace

struct Matrix::State {
  cublasHandle_t handle = nullptr;
  DeviceArray<std::byte> workspace{
      kWorkspaceBytes};  // its own, so that a capture allocates nothing

  ~State() {
    if (handle != nullptr) (void)cublasDestroy(handle);
  }
};

Matrix::Matrix() : state_(std::make_unique<State>()) {
  CheckBlas(cublasCreate(&state_->handle), "starting");
}
Matrix::~Matrix() = default;

// cuBLAS counts columns first: y^T = weight x^T.
void Matrix::Give(cudaStream_t stream, const Product& product) {
  const float one = 1.0f;
  const float beta = product.adds ? 1.0f : 0.0f;
  const auto in = static_cast<int>(product.in);
  const auto out = static_cast<int>(product.out);
  CheckBlas(cublasSetStream(state_->handle, stream), "stream");
  CheckBlas(cublasSetWorkspace(state_->handle, state_->workspace.data(), kWorkspaceBytes),
            "workspace");
  CheckBlas(cublasGemmEx(state_->handle, CUBLAS_OP_T, CUBLAS_OP_N, out,
                         static_cast<int>(product.row_count), in, &one, product.weight, CUDA_R_16F,
                         in, product.x, CUDA_R_16F, in, &beta, product.y, CUDA_R_16F, out,
                         CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT),
            "a product");
}

}  // namespace pqcached::bench

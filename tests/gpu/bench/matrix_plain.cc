// For the emulation, and where there is no cuBLAS.
#include "kernels/base/dtype.h"
#include "tests/gpu/bench/bench.h"
#include "tests/gpu/bench/matrix.h"

namespace pqcached::bench {

#if !defined(PQCACHED_CUDA_EMULATION)

struct Matrix::State {};
Matrix::Matrix() { throw Absent("built without cuBLAS"); }
Matrix::~Matrix() = default;
void Matrix::Give(cudaStream_t, const Product&) {}

#else

namespace {

void Multiply(void* data) {
  using kernels::DType;
  const auto& product = *static_cast<const Product*>(data);
  for (size_t row = 0; row < product.row_count; ++row) {
    for (size_t column = 0; column < product.out; ++column) {
      const size_t at = row * product.out + column;
      float sum = product.adds ? kernels::LoadElement(DType::kF16, product.y, at) : 0.0f;
      for (size_t i = 0; i < product.in; ++i) {
        sum += kernels::LoadElement(DType::kF16, product.x, row * product.in + i) *
               kernels::LoadElement(DType::kF16, product.weight, column * product.in + i);
      }
      kernels::StoreElement(DType::kF16, product.y, at, sum);
    }
  }
}

}  // namespace

struct Matrix::State {
  std::vector<std::unique_ptr<Product> > products;  // that graphs refer to
};
Matrix::Matrix() : state_(std::make_unique<State>()) {}
Matrix::~Matrix() = default;
void Matrix::Give(cudaStream_t stream, const Product& product) {
  state_->products.push_back(std::make_unique<Product>(product));
  Check(cudaLaunchHostFunc(stream, Multiply, state_->products.back().get()), "a product");
}

#endif

}  // namespace pqcached::bench

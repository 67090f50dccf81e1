// Random tensors of keys or values, and rows to write, for the tests of the ingest copy.
#ifndef PQCACHED_TESTS_KERNELS_TENSOR_DATA_H_
#define PQCACHED_TESTS_KERNELS_TENSOR_DATA_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/base/dtype.h"
#include "kernels/rows/ingest.h"
#include "tests/kernels/rows/row_data.h"

namespace pqcached::kernels {

inline constexpr std::byte kUntouched{0xa5};

// One tensor [tokens, heads, dim] of which head 1 (or the only one) is taken.
struct Tensor {
  DType dtype = DType::kF16;
  uint32_t dim = 0;
  ptrdiff_t token_stride = 0;
  ptrdiff_t element_stride = 0;
  size_t head_offset = 0;
  std::vector<std::byte> bytes;

  StridedTensor Head() const {
    return {bytes.empty() ? nullptr : bytes.data() + head_offset, dtype, token_stride,
            element_stride};
  }
  std::byte* Element(uint32_t token, uint32_t index) {
    return bytes.data() + head_offset + token * token_stride + index * element_stride;
  }
  float Get(uint32_t token, uint32_t index) { return LoadElement(dtype, Element(token, index), 0); }
  void Set(uint32_t token, uint32_t index, float value) {
    StoreElement(dtype, Element(token, index), 0, value);
  }
};

// `spread` > 1 leaves holes between elements; `offset` makes everything unaligned.
inline Tensor MakeTensor(DType dtype, uint32_t token_count, uint32_t dim, uint32_t seed,
                         uint32_t spread = 1, size_t offset = 0, uint32_t head_count = 3) {
  Tensor tensor;
  tensor.dtype = dtype;
  tensor.dim = dim;
  tensor.element_stride = static_cast<ptrdiff_t>(spread * DTypeBytes(dtype));
  tensor.token_stride = head_count * dim * tensor.element_stride;
  tensor.head_offset =
      offset + (head_count > 1 ? dim * static_cast<size_t>(tensor.element_stride) : 0);
  tensor.bytes.resize(offset + token_count * static_cast<size_t>(tensor.token_stride));
  const std::vector<float> values = RandomFloats(size_t{token_count} * dim, seed, 3.0f);
  for (uint32_t token = 0; token < token_count; ++token) {
    for (uint32_t i = 0; i < dim; ++i) tensor.Set(token, i, values[token * dim + i]);
  }
  return tensor;
}

struct Target {
  std::vector<std::byte> bytes;
  size_t stride = 0;
  size_t row_bytes = 0;
  size_t offset = 0;
};

inline Target MakeTarget(size_t row_bytes, uint32_t token_count, size_t padding, size_t offset) {
  Target target;
  target.row_bytes = row_bytes;
  target.stride = target.row_bytes + padding;
  target.offset = offset;
  target.bytes.assign(
      offset + (token_count == 0 ? 0 : (token_count - 1) * target.stride + target.row_bytes),
      kUntouched);
  return target;
}

inline Target MakeTarget(DType dtype, uint32_t token_count, uint32_t row_dim, size_t padding,
                         size_t offset) {
  return MakeTarget(row_dim * DTypeBytes(dtype), token_count, padding, offset);
}

}  // namespace pqcached::kernels

#endif  // PQCACHED_TESTS_KERNELS_TENSOR_DATA_H_

#include "client/base/pack.h"

#include <algorithm>
#include <cstring>

namespace pqcached::client {
namespace {

// Packs the elements of dimensions [dim, ndim) at `data` into `to`; returns the end of the output.
std::byte* PackFrom(const TensorView& tensor, uint32_t dim, const std::byte* data,
                    uint64_t element_bytes, std::byte* to) {
  if (IsPacked(tensor, dim)) {
    uint64_t bytes = element_bytes;
    for (uint32_t i = dim; i < tensor.ndim; ++i) bytes *= tensor.shape[i];
    std::memcpy(to, data, bytes);
    return to + bytes;
  }
  const int64_t step = tensor.strides[dim] * static_cast<int64_t>(element_bytes);
  for (uint64_t i = 0; i < tensor.shape[dim]; ++i) {
    to = PackFrom(tensor, dim + 1, data + static_cast<int64_t>(i) * step, element_bytes, to);
  }
  return to;
}

// Packs rows [count, heads, dim] whose last dimension is not contiguous. Works head by head, so
// that tokens that are contiguous share the cache lines read.
void PackTransposed(const TensorView& tensor, const PackRun& run, uint64_t element_bytes,
                    std::byte* to) {
  const uint64_t heads = tensor.shape[1], dim = tensor.shape[2];
  const auto bytes = static_cast<int64_t>(element_bytes);
  constexpr uint64_t kBlockTokens = 64;
  for (uint64_t token = 0; token < run.count; token += kBlockTokens) {
    const uint64_t count = std::min(kBlockTokens, run.count - token);
    for (uint64_t head = 0; head < heads; ++head) {
      const std::byte* from = run.data + static_cast<int64_t>(token) * tensor.strides[0] * bytes +
                              static_cast<int64_t>(head) * tensor.strides[1] * bytes;
      for (uint64_t d = 0; d < dim; ++d) {
        const std::byte* column = from + static_cast<int64_t>(d) * tensor.strides[2] * bytes;
        std::byte* target = to + ((token * heads + head) * dim + d) * element_bytes;
        for (uint64_t i = 0; i < count; ++i) {
          std::memcpy(target + i * heads * dim * element_bytes,
                      column + static_cast<int64_t>(i) * tensor.strides[0] * bytes, element_bytes);
        }
      }
    }
  }
}

// Returns the longest run of consecutive slots of one block.
PackRun SlotRunAt(const TensorView& tensor, uint64_t index, uint64_t end) {
  const auto bytes = static_cast<int64_t>(kernels::DTypeBytes(tensor.dtype));
  const int64_t slot = tensor.slots[index];
  const int64_t in_block = slot % tensor.block_tokens;
  const uint64_t most =
      std::min<uint64_t>(end - index, static_cast<uint64_t>(tensor.block_tokens - in_block));
  uint64_t count = 1;
  while (count < most && tensor.slots[index + count] == slot + static_cast<int64_t>(count)) ++count;
  const int64_t offset =
      slot / tensor.block_tokens * tensor.block_stride + in_block * tensor.strides[0];
  return {tensor.data + offset * bytes, count};
}

}  // namespace

uint64_t BytesPerIndex(const TensorView& tensor) {
  uint64_t bytes = kernels::DTypeBytes(tensor.dtype);
  for (uint32_t dim = 1; dim < tensor.ndim; ++dim) bytes *= tensor.shape[dim];
  return bytes;
}

PackRun RunAt(const TensorView& tensor, uint64_t index, uint64_t end) {
  const auto bytes = static_cast<int64_t>(kernels::DTypeBytes(tensor.dtype));
  if (tensor.slots) return SlotRunAt(tensor, index, end);
  if (!tensor.blocks) {
    return {tensor.data + static_cast<int64_t>(index) * tensor.strides[0] * bytes, end - index};
  }
  end += tensor.first_token;
  index += tensor.first_token;
  const uint64_t in_block = index % tensor.block_tokens;
  const int64_t block = tensor.blocks[index / tensor.block_tokens];
  const int64_t offset =
      block * tensor.block_stride + static_cast<int64_t>(in_block) * tensor.strides[0];
  return {tensor.data + offset * bytes,
          std::min<uint64_t>(end - index, tensor.block_tokens - in_block)};
}

bool IsPacked(const TensorView& tensor, uint32_t first) {
  int64_t expected = 1;
  for (uint32_t dim = std::min(tensor.ndim, 4u); dim-- > first;) {
    if (tensor.shape[dim] != 1 && tensor.strides[dim] != expected) return false;
    expected *= static_cast<int64_t>(tensor.shape[dim]);
  }
  return true;
}

void Pack(const TensorView& tensor, uint64_t begin, uint64_t end, std::byte* to) {
  const uint64_t element_bytes = kernels::DTypeBytes(tensor.dtype);
  const uint64_t index_bytes = BytesPerIndex(tensor);
  TensorView part = tensor;
  while (begin < end) {
    const PackRun run = RunAt(tensor, begin, end);
    part.shape[0] = run.count;
    if (tensor.ndim == 3 && tensor.strides[2] != 1 && tensor.shape[2] > 1) {
      PackTransposed(part, run, element_bytes, to);
    } else {
      PackFrom(part, 0, run.data, element_bytes, to);
    }
    to += run.count * index_bytes;
    begin += run.count;
  }
}

}  // namespace pqcached::client

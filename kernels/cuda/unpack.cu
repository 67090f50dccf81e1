#include "kernels/cuda/unpack.h"

#include "kernels/cuda/elements.cuh"

namespace pqcached::kernels::cuda {
namespace {

constexpr uint32_t kThreads = 256;
constexpr uint32_t kWarps = kThreads / kWarpThreads;
constexpr uint32_t kMaxDim = 256;
constexpr uint32_t kMaxTokens = uint32_t{1} << 30;
constexpr uint32_t kVectorBytes = sizeof(uint4);
constexpr uint32_t kMaxVectorElements = 8;

// Returns the element with index 0 of a token and head.
__device__ std::byte* PlaceOf(const UnpackTensor& tensor, uint32_t token, uint32_t head) {
  const int64_t begin =
      tensor.token_offsets != nullptr ? tensor.token_offsets[token] : token * tensor.token_stride;
  const int64_t element = begin + head * tensor.head_stride;
  return tensor.data + element * static_cast<int64_t>(ElementBytes(tensor.dtype));
}

// Writes the elements of one vector of a row, from element `first` of its part on.
__device__ void WriteVector(DType from_type, uint4 vector, const UnpackTensor& tensor,
                            std::byte* place, uint32_t first) {
  const uint32_t element_bytes = ElementBytes(tensor.dtype);
  const bool same_type = from_type == tensor.dtype;
  if (same_type && tensor.dim_stride == 1) {
    std::byte* const to = place + first * element_bytes;
    if (reinterpret_cast<uintptr_t>(to) % kVectorBytes == 0) {
      *reinterpret_cast<uint4*>(to) = vector;
      return;
    }
  }
  const uint32_t words[4] = {vector.x, vector.y, vector.z, vector.w};
  PQC_UNROLL
  for (uint32_t i = 0; i < kMaxVectorElements; ++i) {
    if (from_type == DType::kF32 && i >= 4) break;
    const int64_t element = (first + i) * tensor.dim_stride;
    std::byte* const to = place + element * static_cast<int64_t>(element_bytes);
    if (from_type == DType::kF32) {
      StoreFloat(tensor.dtype, to, 0, __uint_as_float(words[i % 4]));
      continue;
    }
    const uint32_t bits = words[i / 2] >> i % 2 * 16 & 0xFFFFu;
    if (same_type) {  // bits unchanged, NaN too
      *reinterpret_cast<uint16_t*>(to) = static_cast<uint16_t>(bits);
    } else {
      StoreFloat(tensor.dtype, to, 0,
                 from_type == DType::kF16 ? HalfToFloat(bits) : Bf16ToFloat(bits));
    }
  }
}

// Unpacks one row with one warp: a thread reads 16 bytes, which belong to the key or to the value.
__device__ void UnpackRow(const UnpackRowsArgs& args, uint32_t token, uint32_t head) {
  const std::byte* const row = args.rows[head] + token * args.row_stride_bytes;
  std::byte* const key = PlaceOf(args.key, token, head);
  std::byte* const value = PlaceOf(args.value, token, head);
  const uint32_t vector_elements = kVectorBytes / ElementBytes(args.row_dtype);
  const uint32_t vectors = (args.key_dim + args.value_dim) / vector_elements;
  for (uint32_t i = LaneIndex(); i < vectors; i += kWarpThreads) {
    const uint4 vector = reinterpret_cast<const uint4*>(row)[i];
    const uint32_t first = i * vector_elements;
    if (first < args.key_dim) {
      WriteVector(args.row_dtype, vector, args.key, key, first);
    } else {
      WriteVector(args.row_dtype, vector, args.value, value, first - args.key_dim);
    }
  }
}

__global__ void UnpackRowsKernel(UnpackRowsArgs args) {
  const uint32_t token = blockIdx.x * kWarps + WarpIndex();
  if (token < args.token_count) UnpackRow(args, token, blockIdx.y);
}

bool IsUnpackDim(uint32_t dim) { return dim != 0 && dim % 8 == 0 && dim <= kMaxDim; }

bool IsValidTarget(const UnpackTensor& tensor) {
  return reinterpret_cast<uintptr_t>(tensor.data) % ElementBytes(tensor.dtype) == 0;
}

bool IsValidUnpack(const UnpackRowsArgs& args) {
  const size_t row_bytes = (size_t{args.key_dim} + args.value_dim) * ElementBytes(args.row_dtype);
  if (!IsUnpackDim(args.key_dim) || !IsUnpackDim(args.value_dim) ||
      args.head_count > kMaxUnpackHeads || args.token_count > kMaxTokens ||
      args.row_stride_bytes < row_bytes || args.row_stride_bytes % kVectorBytes != 0 ||
      !IsValidTarget(args.key) || !IsValidTarget(args.value)) {
    return false;
  }
  for (uint32_t head = 0; head < args.head_count; ++head) {
    if (reinterpret_cast<uintptr_t>(args.rows[head]) % kVectorBytes != 0) return false;
  }
  return true;
}

}  // namespace

KernelStatus UnpackRows(const UnpackRowsArgs& args, Stream stream) {
  if (!IsValidUnpack(args)) return {cudaErrorInvalidValue};
  const uint32_t blocks = (args.token_count + kWarps - 1) / kWarps;
  return Launch(UnpackRowsKernel, {dim3(blocks, args.head_count), kThreads, 0}, stream, args);
}

}  // namespace pqcached::kernels::cuda

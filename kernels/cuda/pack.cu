#include "kernels/cuda/pack.h"

#include "kernels/cuda/elements.cuh"
#include "kernels/cuda/step/refused.cuh"

namespace pqcached::kernels::cuda {
namespace {

constexpr uint32_t kThreads = 256;
constexpr uint32_t kWarps = kThreads / kWarpThreads;
constexpr uint32_t kMaxDim = 256;
constexpr uint32_t kMaxHeads = 65535;
constexpr float kLargestFloat = 3.402823466e38f;

__device__ const std::byte* TokenOf(const PackRowsArgs& args, const PackTensor& tensor,
                                    uint32_t token, uint32_t head) {
  int64_t element = head * tensor.head_stride;
  if (args.block_table != nullptr) {
    const int64_t block = args.block_table[token / args.block_tokens];
    element += block * tensor.block_stride + token % args.block_tokens * tensor.token_stride;
  } else {
    element += token * tensor.token_stride;
  }
  return tensor.data + element * static_cast<int64_t>(ElementBytes(tensor.dtype));
}

// Copies one part of a row with one warp: 16 bytes per thread where types and alignment allow.
__device__ void PackPart(DType from_type, const std::byte* from, DType to_type, std::byte* to,
                         uint32_t dim) {
  const uint32_t bytes = dim * ElementBytes(to_type);
  const auto addresses = reinterpret_cast<uintptr_t>(from) | reinterpret_cast<uintptr_t>(to);
  if (from_type == to_type && (addresses | bytes) % 16 == 0) {
    for (uint32_t i = LaneIndex(); i < bytes / 16; i += kWarpThreads) {
      reinterpret_cast<uint4*>(to)[i] = reinterpret_cast<const uint4*>(from)[i];
    }
    return;
  }
  for (uint32_t i = LaneIndex(); i < dim; i += kWarpThreads) {
    if (from_type == to_type && from_type != DType::kF32) {  // bits unchanged, NaN too
      reinterpret_cast<uint16_t*>(to)[i] = reinterpret_cast<const uint16_t*>(from)[i];
    } else {
      StoreFloat(to_type, to, i, LoadFloat(from_type, from, i));
    }
  }
}

// Packs token first_token + t of one head with one warp, and returns the row.
__device__ std::byte* PackRow(const PackRowsArgs& args, uint32_t t, uint32_t head) {
  const uint32_t token = args.first_token + t;
  std::byte* row = args.rows + head * args.head_stride_bytes + t * args.row_stride_bytes;
  PackPart(args.key.dtype, TokenOf(args, args.key, token, head), args.row_dtype, row, args.key_dim);
  if (args.value_dim == 0) return row;
  PackPart(args.value.dtype, TokenOf(args, args.value, token, head), args.row_dtype,
           row + args.key_dim * ElementBytes(args.row_dtype), args.value_dim);
  return row;
}

__global__ void PackRowsKernel(PackRowsArgs args) {
  const uint32_t t = blockIdx.x * kWarps + WarpIndex();
  if (t < args.token_count) PackRow(args, t, blockIdx.y);
}

// Notes the token when an element of its part, [begin, end) of a row, is not finite.
__device__ void CheckPart(DType dtype, const std::byte* row, uint32_t begin, uint32_t end,
                          const RefusedElement& bad, uint32_t token) {
  for (uint32_t i = begin + LaneIndex(); i < end; i += kWarpThreads) {
    const float element = LoadFloat(dtype, row, i);
    const bool is_finite = element >= -kLargestFloat && element <= kLargestFloat;
    if (!is_finite) Refuse(bad, token);
  }
}

// Packs the query tokens of one lane with one block, a token per warp.
__global__ void PackStepRowsKernel(PackStepRowsArgs args) {
  if (blockIdx.x == 0 && threadIdx.x == 0) *args.packed = 1;
  const SeatItem item = args.seats[blockIdx.x / args.shape.kv_heads];
  if (item.item == kEmptySeat) return;
  const uint32_t head = blockIdx.x % args.shape.kv_heads;
  for (uint32_t i = WarpIndex(); i < args.shape.query_length; i += kWarps) {
    const uint32_t token = item.query_begin + i;
    const std::byte* row = PackRow(args.rows, token, head);
    __syncwarp();
    const uint32_t key_dim = args.rows.key_dim;
    CheckPart(args.rows.row_dtype, row, 0, key_dim, args.bad_key, token);
    CheckPart(args.rows.row_dtype, row, key_dim, key_dim + args.rows.value_dim, args.bad_value,
              token);
  }
}

bool IsValidPack(const PackRowsArgs& args) {
  const size_t row_bytes = (size_t{args.key_dim} + args.value_dim) * ElementBytes(args.row_dtype);
  return args.key_dim != 0 && args.key_dim % 8 == 0 && args.key_dim <= kMaxDim &&
         args.value_dim % 8 == 0 && args.value_dim <= kMaxDim && args.head_count <= kMaxHeads &&
         args.row_stride_bytes >= row_bytes &&
         (args.block_table == nullptr || args.block_tokens != 0);
}

}  // namespace

KernelStatus PackRows(const PackRowsArgs& args, Stream stream) {
  if (!IsValidPack(args)) return {cudaErrorInvalidValue};
  const uint32_t blocks = (args.token_count + kWarps - 1) / kWarps;
  return Launch(PackRowsKernel, {dim3(blocks, args.head_count), kThreads, 0}, stream, args);
}

KernelStatus PackStepRows(const PackStepRowsArgs& args, Stream stream) {
  const uint64_t lanes = uint64_t{args.shape.seat_capacity} * args.shape.kv_heads;
  if (lanes > kMaxHeads || !IsValidPack(args.rows) || args.rows.block_table != nullptr ||
      args.rows.first_token != 0) {
    return {cudaErrorInvalidValue};
  }
  return Launch(PackStepRowsKernel, {dim3(static_cast<uint32_t>(lanes)), kThreads, 0}, stream,
                args);
}

}  // namespace pqcached::kernels::cuda

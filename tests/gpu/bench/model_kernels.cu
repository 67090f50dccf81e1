#include "tests/gpu/bench/model_kernels.h"

#include "kernels/cuda/elements.cuh"
#include "kernels/cuda/launch.cuh"

namespace pqcached::bench {

using namespace pqcached::kernels::cuda;
using kernels::DType;

namespace {

constexpr uint32_t kThreads = 256;

__device__ float Load(const std::byte* x, size_t i) { return LoadFloat(DType::kF16, x, i); }
__device__ void Store(std::byte* x, size_t i, float value) { StoreFloat(DType::kF16, x, i, value); }

__global__ void EmptyKernel() {}

__global__ void RmsNormKernel(const std::byte* x, uint32_t dim, std::byte* out) {
  const size_t first = size_t{blockIdx.x} * dim;
  float sum = 0.0f;
  for (uint32_t i = threadIdx.x; i < dim; i += kThreads) {
    const float value = Load(x, first + i);
    sum += value * value;
  }
  sum = BlockSum(sum, &Shared<float>());
  const float factor = 1.0f / sqrtf(sum / static_cast<float>(dim) + 1e-5f);
  for (uint32_t i = threadIdx.x; i < dim; i += kThreads) {
    Store(out, first + i, Load(x, first + i) * factor);
  }
}

__global__ void RotateKernel(RotateArgs args) {
  const uint32_t head = blockIdx.x;  // query heads, then keys, then values
  const uint32_t batch = blockIdx.y;
  const uint32_t heads = args.query_heads + 2 * args.kv_heads;
  const std::byte* from = args.qkv + (size_t{batch} * heads + head) * args.dim * 2;
  const uint32_t half = args.dim / 2;
  for (uint32_t i = threadIdx.x; i < half; i += kThreads) {
    float a = Load(from, i);
    float b = Load(from, half + i);
    if (head < args.query_heads + args.kv_heads) {
      const float angle = static_cast<float>(args.position) *
                          powf(500000.0f, -static_cast<float>(i) / static_cast<float>(half));
      const float rotated = a * cosf(angle) - b * sinf(angle);
      b = a * sinf(angle) + b * cosf(angle);
      a = rotated;
    }
    if (head < args.query_heads) {
      float* to = args.queries + (size_t{batch} * args.query_heads + head) * args.dim;
      to[i] = a;
      to[half + i] = b;
      continue;
    }
    const bool is_value = head >= args.query_heads + args.kv_heads;
    const uint32_t kv_head = (head - args.query_heads) % args.kv_heads;
    std::byte* row = args.rows + (size_t{batch} * args.kv_heads + kv_head) * args.dim * 4;
    const uint32_t first = is_value ? args.dim : 0;
    Store(row, first + i, a);
    Store(row, first + half + i, b);
  }
}

__global__ void ToHalfKernel(const float* x, uint32_t count, std::byte* out) {
  const uint32_t i = blockIdx.x * kThreads + threadIdx.x;
  if (i < count) Store(out, i, x[i]);
}

__global__ void SiluMultiplyKernel(const std::byte* x, uint32_t dim, std::byte* out) {
  const uint32_t i = blockIdx.x * kThreads + threadIdx.x;
  if (i >= dim) return;
  const size_t first = size_t{blockIdx.y} * 2 * dim;
  const float gate = Load(x, first + i);
  const float up = Load(x, first + dim + i);
  Store(out, size_t{blockIdx.y} * dim + i, gate / (1.0f + expf(-gate)) * up);
}

uint32_t BlocksFor(uint32_t count) { return (count + kThreads - 1) / kThreads; }

}  // namespace

KernelStatus GiveEmpty(Stream stream) {
  return Launch(EmptyKernel, {dim3(1), kWarpThreads, 0}, stream);
}

KernelStatus RmsNorm(const std::byte* x, uint32_t row_count, uint32_t dim, std::byte* out,
                     Stream stream) {
  return Launch(RmsNormKernel, {dim3(row_count), kThreads, kThreads / kWarpThreads * sizeof(float)},
                stream, x, dim, out);
}

KernelStatus Rotate(const RotateArgs& args, Stream stream) {
  return Launch(RotateKernel, {dim3(args.query_heads + 2 * args.kv_heads, args.batch), kThreads, 0},
                stream, args);
}

KernelStatus ToHalf(const float* x, uint32_t count, std::byte* out, Stream stream) {
  return Launch(ToHalfKernel, {dim3(BlocksFor(count)), kThreads, 0}, stream, x, count, out);
}

KernelStatus SiluMultiply(const std::byte* x, uint32_t row_count, uint32_t dim, std::byte* out,
                          Stream stream) {
  return Launch(SiluMultiplyKernel, {dim3(BlocksFor(dim), row_count), kThreads, 0}, stream, x, dim,
                out);
}

}  // namespace pqcached::bench

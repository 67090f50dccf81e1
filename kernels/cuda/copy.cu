#include "kernels/cuda/copy.h"

#include "kernels/cuda/launch.cuh"

namespace pqcached::kernels::cuda {
namespace {

constexpr uint32_t kThreads = 256;
constexpr uint32_t kMaxRanges = 65535;
constexpr uint32_t kMaxBlocksPerRange = 1024;
constexpr uint64_t kWide = sizeof(uint4);

__device__ uint64_t BytesToAlignment(const std::byte* address) {
  return (kWide - reinterpret_cast<uintptr_t>(address) % kWide) % kWide;
}

__device__ void CopyBytes(const ByteRange& range, uint64_t begin, uint64_t end, uint64_t first,
                          uint64_t step) {
  for (uint64_t i = begin + first; i < end; i += step) range.to[i] = range.from[i];
}

__global__ void CopyRangesKernel(CopyRangesArgs args) {
  const ByteRange range = args.ranges[blockIdx.y];
  const uint64_t first = uint64_t{blockIdx.x} * kThreads + threadIdx.x;
  const uint64_t step = uint64_t{gridDim.x} * kThreads;
  uint64_t head = BytesToAlignment(range.from);
  if (head != BytesToAlignment(range.to) || head > range.size_bytes) head = range.size_bytes;
  const uint64_t words = (range.size_bytes - head) / kWide;
  const auto* from = reinterpret_cast<const uint4*>(range.from + head);
  auto* to = reinterpret_cast<uint4*>(range.to + head);
  for (uint64_t i = first; i < words; i += step) to[i] = from[i];
  CopyBytes(range, 0, head, first, step);
  CopyBytes(range, head + words * kWide, range.size_bytes, first, step);
}

}  // namespace

KernelStatus CopyRanges(const CopyRangesArgs& args, Stream stream) {
  if (args.range_capacity > kMaxRanges || args.blocks_per_range < 1 ||
      args.blocks_per_range > kMaxBlocksPerRange) {
    return {cudaErrorInvalidValue};
  }
  return Launch(CopyRangesKernel, {dim3(args.blocks_per_range, args.range_capacity), kThreads, 0},
                stream, args);
}

}  // namespace pqcached::kernels::cuda

#include "kernels/cuda/kcache.h"

#include "kernels/cuda/elements.cuh"

namespace pqcached::kernels::cuda {
namespace {

constexpr uint32_t kThreads = 256;
constexpr uint32_t kWarps = kThreads / kWarpThreads;
constexpr uint32_t kTokensPerBlock = 64;
constexpr uint32_t kMaxDim = 256;
constexpr uint32_t kDimsPerLane = kMaxDim / kWarpThreads;
constexpr uint32_t kMaxGroup = 64;
constexpr uint32_t kMaxLanes = 65535;
constexpr uint32_t kValueThreads = 128;
constexpr uint32_t kTileTokens = 128;

// One warp scores one key, with its dimensions spread over the threads: the keys are read once, in
// order, for all heads.
__global__ void ExactScoresKernel(ExactScoresArgs args) {
  const KeyLane lane = args.lanes[blockIdx.y];
  const uint32_t end = Smaller(lane.token_count, (blockIdx.x + 1) * kTokensPerBlock);
  for (uint32_t token = blockIdx.x * kTokensPerBlock + WarpIndex(); token < end; token += kWarps) {
    const std::byte* row = lane.keys + token * args.row_stride_bytes;
    float key[kDimsPerLane];
    PQC_UNROLL
    for (uint32_t i = 0; i < kDimsPerLane; ++i) {
      const uint32_t dim = i * kWarpThreads + LaneIndex();
      key[i] = dim < args.key_dim ? LoadFloat(args.dtype, row, dim) : 0.0f;
    }
    for (uint32_t head = 0; head < args.group_size; ++head) {
      const float* query = lane.queries + size_t{head} * args.key_dim;
      float sum = 0.0f;
      PQC_UNROLL
      for (uint32_t i = 0; i < kDimsPerLane; ++i) {
        const uint32_t dim = i * kWarpThreads + LaneIndex();
        if (dim < args.key_dim) sum += query[dim] * key[i];
      }
      sum = WarpSum(sum);
      if (LaneIndex() == 0) lane.scores[head * args.score_stride + token] = args.scale * sum;
    }
  }
}

struct ValueShared {
  float weights[kTileTokens];
  float sums[kValueThreads / kWarpThreads];
};

// One block computes one head of one lane, and one thread a value dimension.
__global__ void WeightedValuesKernel(WeightedValuesArgs args) {
  auto& shared = Shared<ValueShared>();
  const uint32_t head = blockIdx.x;
  const KeyLane lane = args.lanes[blockIdx.y];
  const uint32_t count = args.counts[blockIdx.y];
  const float lse = args.lse[size_t{blockIdx.y} * args.group_size + head];
  const float* scores = lane.scores + head * args.score_stride;
  const size_t first = blockIdx.y * args.token_stride;
  float output[kMaxDim / kValueThreads] = {};
  float weight_sum = 0.0f;
  for (uint32_t begin = 0; begin < count; begin += kTileTokens) {
    const uint32_t tile = Smaller(kTileTokens, count - begin);
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < tile; i += kValueThreads) {
      shared.weights[i] = expf(scores[args.tokens[first + begin + i]] - lse);
      weight_sum += shared.weights[i];
    }
    __syncthreads();
    for (uint32_t i = 0; i < tile; ++i) {
      const std::byte* value = args.addresses[first + begin + i];
      PQC_UNROLL
      for (uint32_t part = 0; part < kMaxDim / kValueThreads; ++part) {
        const uint32_t dim = part * kValueThreads + threadIdx.x;
        if (dim < args.value_dim) {
          output[part] += shared.weights[i] * LoadFloat(args.dtype, value, dim);
        }
      }
    }
  }
  weight_sum = BlockSum(weight_sum, shared.sums);
  const float factor = !args.renormalise ? 1.0f : weight_sum > 0.0f ? 1.0f / weight_sum : 0.0f;
  float* out = args.output + (size_t{blockIdx.y} * args.group_size + head) * args.value_dim;
  PQC_UNROLL
  for (uint32_t part = 0; part < kMaxDim / kValueThreads; ++part) {
    const uint32_t dim = part * kValueThreads + threadIdx.x;
    if (dim < args.value_dim) out[dim] = factor * output[part];
  }
}

bool IsDim(uint32_t dim) { return dim >= 32 && dim <= kMaxDim && dim % 8 == 0; }

}  // namespace

KernelStatus ExactScores(const ExactScoresArgs& args, Stream stream) {
  if (!IsDim(args.key_dim) || args.group_size == 0 || args.group_size > kMaxGroup ||
      args.lane_capacity > kMaxLanes || args.row_stride_bytes % 16 != 0) {
    return {cudaErrorInvalidValue};
  }
  const uint32_t blocks = (args.token_capacity + kTokensPerBlock - 1) / kTokensPerBlock;
  return Launch(ExactScoresKernel, {dim3(blocks, args.lane_capacity), kThreads, 0}, stream, args);
}

KernelStatus WeightedValues(const WeightedValuesArgs& args, Stream stream) {
  if (!IsDim(args.value_dim) || args.group_size == 0 || args.group_size > kMaxGroup ||
      args.lane_capacity > kMaxLanes) {
    return {cudaErrorInvalidValue};
  }
  return Launch(WeightedValuesKernel,
                {dim3(args.group_size, args.lane_capacity), kValueThreads, sizeof(ValueShared)},
                stream, args);
}

}  // namespace pqcached::kernels::cuda

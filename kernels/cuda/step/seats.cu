#include "kernels/cuda/step/seats.h"

#include "kernels/cuda/elements.cuh"
#include "kernels/cuda/launch.cuh"

namespace pqcached::kernels::cuda {
namespace {

constexpr uint32_t kThreads = 256;
constexpr uint32_t kMaxLanes = 65535;
constexpr uint32_t kMaxQueries = 64;  // L * G

bool IsValidShape(const SeatShape& shape) {
  return uint64_t{shape.seat_capacity} * shape.kv_heads <= kMaxLanes && shape.group_size > 0 &&
         shape.query_length > 0 && uint64_t{shape.group_size} * shape.query_length <= kMaxQueries;
}

// A query of a lane; one block processes one.
struct LaneQuery {
  uint32_t seat;
  uint32_t kv_head;
  uint32_t query;  // token * G + head of the group
  SeatItem item;

  __device__ LaneQuery(const SeatShape& shape, const SeatItem* seats)
      : seat(blockIdx.y / shape.kv_heads),
        kv_head(blockIdx.y % shape.kv_heads),
        query(blockIdx.x),
        item(seats[seat]) {}

  // Index of the query token in the engine's tensors. head() is the index of the query head in that
  // token.
  __device__ uint32_t token(const SeatShape& shape) const {
    return item.query_begin + query / shape.group_size;
  }
  __device__ uint32_t head(const SeatShape& shape) const {
    return kv_head * shape.group_size + query % shape.group_size;
  }
  // Index of the query in tensors [lane, L, G].
  __device__ size_t lane_query(const SeatShape& shape) const {
    return size_t{blockIdx.y} * shape.query_length * shape.group_size + query;
  }
};

LaunchShape PerQuery(const SeatShape& shape) {
  return {dim3(shape.query_length * shape.group_size, shape.seat_capacity * shape.kv_heads),
          kThreads, 0};
}

__global__ void ArrangeQueriesKernel(ArrangeQueriesArgs args) {
  const LaneQuery at(args.shape, args.seats);
  if (at.item.item == kEmptySeat) return;
  const int64_t first =
      at.token(args.shape) * args.token_stride + at.head(args.shape) * args.head_stride;
  float* to = args.lane_queries + at.lane_query(args.shape) * args.key_dim;
  const std::byte* from = args.queries + first * static_cast<int64_t>(ElementBytes(args.dtype));
  for (uint32_t i = threadIdx.x; i < args.key_dim; i += kThreads) {
    const std::byte* element =
        from + static_cast<int64_t>(i) * args.dim_stride * ElementBytes(args.dtype);
    to[i] = LoadFloat(args.dtype, element, 0);
  }
}

__global__ void ArrangeOutputsKernel(ArrangeOutputsArgs args) {
  const LaneQuery at(args.shape, args.seats);
  if (at.item.item == kEmptySeat) return;
  const size_t from = at.lane_query(args.shape);
  const size_t query_heads = size_t{args.shape.kv_heads} * args.shape.group_size;
  const size_t to = at.token(args.shape) * query_heads + at.head(args.shape);
  for (uint32_t i = threadIdx.x; i < args.value_dim; i += kThreads) {
    args.output[to * args.value_dim + i] = args.lane_output[from * args.value_dim + i];
  }
  if (threadIdx.x == 0 && args.lse != nullptr) args.lse[to] = args.lane_lse[from];
}

__global__ void ArrangePositionsKernel(ArrangePositionsArgs args) {
  const uint32_t lane = blockIdx.x;
  const SeatItem item = args.seats[lane / args.shape.kv_heads];
  if (item.item == kEmptySeat) return;
  const uint32_t count = args.lane_counts[lane];
  const size_t list = size_t{item.item} * args.lists_per_item + args.list;
  const size_t to = list * args.shape.kv_heads + lane % args.shape.kv_heads;
  for (uint32_t i = threadIdx.x; i < count; i += kThreads) {
    args.positions[to * args.stride + i] = args.lane_positions[lane * args.lane_stride + i];
  }
  if (threadIdx.x == 0) args.counts[to] = count;
}

}  // namespace

KernelStatus ArrangeQueries(const ArrangeQueriesArgs& args, Stream stream) {
  if (!IsValidShape(args.shape)) return {cudaErrorInvalidValue};
  return Launch(ArrangeQueriesKernel, PerQuery(args.shape), stream, args);
}

KernelStatus ArrangeOutputs(const ArrangeOutputsArgs& args, Stream stream) {
  if (!IsValidShape(args.shape)) return {cudaErrorInvalidValue};
  return Launch(ArrangeOutputsKernel, PerQuery(args.shape), stream, args);
}

KernelStatus ArrangePositions(const ArrangePositionsArgs& args, Stream stream) {
  if (!IsValidShape(args.shape) || args.list >= args.lists_per_item) {
    return {cudaErrorInvalidValue};
  }
  return Launch(ArrangePositionsKernel,
                {dim3(args.shape.seat_capacity * args.shape.kv_heads), kThreads, 0}, stream, args);
}

}  // namespace pqcached::kernels::cuda

// One block per lane. All threads walk over the few pieces of sink and window between excluded
// ranges, and each writes some positions of every piece.
#include "kernels/cuda/step/own_rows.h"

#include "kernels/cuda/launch.cuh"

namespace pqcached::kernels::cuda {
namespace {

constexpr uint32_t kThreads = 256;
constexpr uint32_t kMaxLanes = 65535;
constexpr uint32_t kMaxQueryLength = 8;

// Positions of one lane.
class OwnArranger {
 public:
  __device__ OwnArranger(const ArrangeOwnRowsArgs& args, const OwnItem& item)
      : args_(args),
        item_(item),
        positions_(args.lane_positions + blockIdx.x * args.lane_stride),
        token_end_(item.query_position + args.first_token + threadIdx.x + 1) {}

  __device__ void Run() {
    const uint32_t first_end = item_.query_position + args_.first_token + 1;
    const uint32_t end = first_end + args_.shape.query_length - 1;
    if (args_.window_tokens > 0) {
      AddInterval(first_end - Smaller(args_.window_tokens, first_end), end);
    } else {
      AddInterval(0, item_.sink_end);
      AddInterval(item_.window_begin, end);
    }
    const auto capacity = static_cast<uint32_t>(Smaller(args_.lane_stride, size_t{UINT32_MAX}));
    if (threadIdx.x < args_.shape.query_length) {
      const size_t token = size_t{blockIdx.x} * args_.shape.query_length + threadIdx.x;
      args_.row_ranges[2 * token] = Smaller(before_window_, capacity);
      args_.row_ranges[2 * token + 1] = Smaller(up_to_token_, capacity);
    }
    if (threadIdx.x != 0) return;
    args_.lane_counts[blockIdx.x] = Smaller(stored_, capacity);
    args_.own_counts[blockIdx.x] = Smaller(count_, capacity);
  }

 private:
  // Adds the pieces of [begin, end) outside the excluded ranges.
  __device__ void AddInterval(uint32_t begin, uint32_t end) {
    for (uint32_t i = 0; i < args_.excluded_capacity; ++i) {
      const OwnRange gap = args_.excluded[i];
      if (gap.end <= begin || gap.begin >= end || gap.begin >= gap.end) continue;
      AddPiece(begin, gap.begin);
      begin = gap.end;
    }
    AddPiece(begin, end);
  }

  __device__ void AddPiece(uint32_t begin, uint32_t end) {
    if (begin >= end) return;
    for (size_t i = threadIdx.x; i < end - begin && count_ + i < args_.lane_stride; i += kThreads) {
      positions_[count_ + i] = begin + static_cast<uint32_t>(i);
    }
    count_ += end - begin;
    stored_ += CountBelow(item_.stored_end, begin, end);
    up_to_token_ += CountBelow(token_end_, begin, end);
    if (args_.window_tokens > 0 && token_end_ > args_.window_tokens) {
      before_window_ += CountBelow(token_end_ - args_.window_tokens, begin, end);
    }
  }

  // Returns how many positions of [begin, end) are below `limit`.
  __device__ static uint32_t CountBelow(uint32_t limit, uint32_t begin, uint32_t end) {
    return Larger(begin, Smaller(limit, end)) - begin;
  }

  const ArrangeOwnRowsArgs& args_;
  const OwnItem item_;
  uint32_t* const positions_;
  const uint32_t token_end_;    // of the query token whose range this thread writes
  uint32_t count_ = 0;          // positions of the pieces so far
  uint32_t stored_ = 0;         // those below stored_end
  uint32_t up_to_token_ = 0;    // those below token_end_
  uint32_t before_window_ = 0;  // those before the window of that token
};

__global__ void ArrangeOwnRowsKernel(ArrangeOwnRowsArgs args) {
  const uint32_t seat = blockIdx.x / args.shape.kv_heads;
  if (args.seats[seat].item != kEmptySeat) {
    OwnArranger(args, args.items[seat]).Run();
    return;
  }
  if (threadIdx.x < args.shape.query_length) {
    const size_t token = size_t{blockIdx.x} * args.shape.query_length + threadIdx.x;
    args.row_ranges[2 * token] = args.row_ranges[2 * token + 1] = 0;
  }
  if (threadIdx.x == 0) args.lane_counts[blockIdx.x] = args.own_counts[blockIdx.x] = 0;
}

__global__ void AppendOwnRowsKernel(AppendOwnRowsArgs args) {
  const uint32_t lane = blockIdx.x;
  const uint32_t seat = lane / args.shape.kv_heads;
  const uint32_t head = lane % args.shape.kv_heads;
  const uint32_t count = args.own_counts[lane];
  const OwnItem item = args.items[seat];
  const uint32_t query_begin = args.seats[seat].query_begin;
  const uint32_t* positions = args.lane_positions + lane * args.lane_stride;
  const std::byte** addresses = args.addresses + lane * args.lane_stride;
  const size_t recent = size_t{lane} * args.recent_capacity;
  const size_t present = size_t{head} * args.token_capacity + query_begin;
  for (uint32_t i = args.lane_counts[lane] + threadIdx.x; i < count; i += kThreads) {
    const uint32_t position = positions[i];
    addresses[i] =
        position < item.query_position
            ? args.recent + (recent + position - item.stored_end) * args.row_stride_bytes
            : args.step_rows + (present + position - item.query_position) * args.row_stride_bytes;
  }
  if (threadIdx.x == 0) args.row_counts[lane] = count;
}

bool IsValidShape(const SeatShape& shape) {
  return uint64_t{shape.seat_capacity} * shape.kv_heads <= kMaxLanes && shape.query_length > 0 &&
         shape.query_length <= kMaxQueryLength;
}

LaunchShape PerLane(const SeatShape& shape) {
  return {dim3(shape.seat_capacity * shape.kv_heads), kThreads, 0};
}

}  // namespace

KernelStatus ArrangeOwnRows(const ArrangeOwnRowsArgs& args, Stream stream) {
  if (!IsValidShape(args.shape) || args.first_token >= kMaxQueryLength) {
    return {cudaErrorInvalidValue};
  }
  return Launch(ArrangeOwnRowsKernel, PerLane(args.shape), stream, args);
}

KernelStatus AppendOwnRows(const AppendOwnRowsArgs& args, Stream stream) {
  if (!IsValidShape(args.shape) || args.row_stride_bytes % 16 != 0) {
    return {cudaErrorInvalidValue};
  }
  return Launch(AppendOwnRowsKernel, PerLane(args.shape), stream, args);
}

}  // namespace pqcached::kernels::cuda

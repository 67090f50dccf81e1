// One block per lane. For lists it sets a bit for every position of the lane's list, and then reads
// the bits back in order, 128 per thread: the positions ascend, and repeated ones count once,
// whatever the order of the threads. Bits are cleared as they are read.
#include "kernels/cuda/step/lists.h"

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/step/refused.cuh"

namespace pqcached::kernels::cuda {
namespace {

constexpr uint32_t kThreads = 256;
constexpr uint32_t kWarps = kThreads / kWarpThreads;
constexpr uint32_t kMaxLanes = 65535;
constexpr uint32_t kQuadBits = 128;  // of one uint4
constexpr int32_t kPadding = -1;

struct ListShared {
  uint32_t sums[kWarps];
  uint32_t padding_count;  // elements from the first -1 on
};

class ListArranger {
 public:
  __device__ ListArranger(const ArrangeListsArgs& args, const SeatItem& item)
      : args_(args), row_end_(Smaller(item.row_end, args.token_capacity)) {
    const uint32_t kv_head = blockIdx.x % args.shape.kv_heads;
    list_ = size_t{item.item} * args.list_count + (args.list_count == 1 ? 0 : kv_head);
    bits_ = args.bits + blockIdx.x * ListBitWords(args.token_capacity);
  }

  __device__ void Run() {
    SetBits(FindLength());
    __syncthreads();
    WritePositions();
  }

 private:
  __device__ uint32_t FindLength() {
    if (args_.lengths != nullptr) {
      const uint32_t length = args_.lengths[list_];
      if (length > args_.capacity && threadIdx.x == 0) Refuse(args_.refused_length, list_);
      return Smaller(length, args_.capacity);
    }
    auto& shared = Shared<ListShared>();
    if (threadIdx.x == 0) shared.padding_count = 0;
    __syncthreads();
    const int32_t* list = args_.lists + list_ * args_.capacity;
    for (uint32_t i = threadIdx.x; i < args_.capacity; i += kThreads) {
      if (list[i] != kPadding) continue;
      atomicMax(&shared.padding_count, args_.capacity - i);
      break;
    }
    __syncthreads();
    return args_.capacity - shared.padding_count;
  }

  __device__ void SetBits(uint32_t length) {
    const size_t first = list_ * args_.capacity;
    for (uint32_t i = threadIdx.x; i < length; i += kThreads) {
      const auto position = static_cast<uint32_t>(args_.lists[first + i]);
      const bool ascends =
          !args_.must_ascend || i == 0 || args_.lists[first + i] > args_.lists[first + i - 1];
      if (position >= row_end_ || !ascends) {  // also negative numbers
        Refuse(args_.refused_position, first + i);
        continue;
      }
      atomicOr(&bits_[position / 32], 1u << position % 32);
    }
  }

  __device__ void WritePositions() {
    auto& shared = Shared<ListShared>();
    auto* quads = reinterpret_cast<uint4*>(bits_);
    const uint32_t quad_count = (row_end_ + kQuadBits - 1) / kQuadBits;
    uint32_t written = 0;
    for (uint32_t first = 0; first < quad_count; first += kThreads) {
      const uint32_t index = first + threadIdx.x;
      uint4 quad = make_uint4(0, 0, 0, 0);
      if (index < quad_count) quad = quads[index];
      const auto count =
          static_cast<uint32_t>(__popc(quad.x) + __popc(quad.y) + __popc(quad.z) + __popc(quad.w));
      uint32_t at = written + BlockSumBefore(count, shared.sums);
      written += BlockSum(count, shared.sums);
      if (count == 0) continue;
      quads[index] = make_uint4(0, 0, 0, 0);
      at = WriteWord(quad.x, index * kQuadBits, at);
      at = WriteWord(quad.y, index * kQuadBits + 32, at);
      at = WriteWord(quad.z, index * kQuadBits + 64, at);
      WriteWord(quad.w, index * kQuadBits + 96, at);
    }
    if (threadIdx.x == 0) args_.lane_counts[blockIdx.x] = written;
  }

  __device__ uint32_t WriteWord(uint32_t word, uint32_t first_position, uint32_t at) {
    uint32_t* positions = args_.lane_positions + blockIdx.x * args_.lane_stride;
    for (; word != 0; word &= word - 1) {
      positions[at++] = first_position + static_cast<uint32_t>(__ffs(word) - 1);
    }
    return at;
  }

  const ArrangeListsArgs& args_;
  uint32_t row_end_;
  size_t list_;
  uint32_t* bits_;
};

__global__ void ArrangeListsKernel(ArrangeListsArgs args) {
  const SeatItem item = args.seats[blockIdx.x / args.shape.kv_heads];
  if (item.item == kEmptySeat) {
    if (threadIdx.x == 0) args.lane_counts[blockIdx.x] = 0;
    return;
  }
  ListArranger(args, item).Run();
}

__global__ void ArrangeRangesKernel(ArrangeRangesArgs args) {
  const SeatItem item = args.seats[blockIdx.x / args.shape.kv_heads];
  uint32_t* positions = args.lane_positions + blockIdx.x * args.lane_stride;
  const uint64_t end = args.first + args.lane_stride;
  uint64_t before = 0;  // positions of the ranges before this one
  for (uint32_t i = 0; item.item != kEmptySeat && i < args.ranges_per_item; ++i) {
    const size_t range = size_t{item.item} * args.ranges_per_item + i;
    const uint64_t range_begin = args.ranges[2 * range];
    const uint64_t range_end = args.ranges[2 * range + 1];
    if (range_begin > range_end || range_end > item.row_end) {
      if (threadIdx.x == 0) Refuse(args.refused_range, range);
      continue;
    }
    const uint64_t after = before + (range_end - range_begin);
    for (uint64_t k = Larger(before, args.first) + threadIdx.x; k < Smaller(after, end);
         k += kThreads) {
      positions[k - args.first] = static_cast<uint32_t>(range_begin + (k - before));
    }
    before = after;
  }
  if (threadIdx.x != 0) return;
  const uint64_t count = before > args.first ? Smaller(before, end) - args.first : 0;
  args.lane_counts[blockIdx.x] = static_cast<uint32_t>(count);
}

}  // namespace

KernelStatus ArrangeRanges(const ArrangeRangesArgs& args, Stream stream) {
  const uint64_t lanes = uint64_t{args.shape.seat_capacity} * args.shape.kv_heads;
  if (lanes > kMaxLanes || args.lane_stride > UINT32_MAX) return {cudaErrorInvalidValue};
  return Launch(ArrangeRangesKernel, {dim3(static_cast<uint32_t>(lanes)), kThreads, 0}, stream,
                args);
}

KernelStatus ArrangeLists(const ArrangeListsArgs& args, Stream stream) {
  const uint64_t lanes = uint64_t{args.shape.seat_capacity} * args.shape.kv_heads;
  if (lanes > kMaxLanes || (args.list_count != 1 && args.list_count != args.shape.kv_heads) ||
      args.lane_stride < args.capacity) {
    return {cudaErrorInvalidValue};
  }
  return Launch(ArrangeListsKernel,
                {dim3(static_cast<uint32_t>(lanes)), kThreads, sizeof(ListShared)}, stream, args);
}

}  // namespace pqcached::kernels::cuda

#include "kernels/cuda/rows.h"

#include "kernels/cuda/launch.cuh"

namespace pqcached::kernels::cuda {
namespace {

constexpr uint32_t kThreads = 256;
constexpr uint32_t kWarps = kThreads / kWarpThreads;
constexpr uint32_t kMaxLanes = 65535;
constexpr uint32_t kRowsPerBlock = 4 * kWarps;

// Returns the last span that begins at or before the position; span_end when there is none.
__device__ uint32_t FindSpan(const LocateRowsArgs& args, const RowLane& lane, uint32_t position) {
  uint32_t low = lane.span_begin;
  uint32_t high = lane.span_end;
  while (low < high) {
    const uint32_t middle = low + (high - low) / 2;
    if (args.spans[middle].first_position <= position) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low == lane.span_begin ? lane.span_end : low - 1;
}

struct Row {
  const std::byte* address;  // null: no span contains the position
  bool is_hit;
  bool is_host_only;
};

__device__ Row LocateRow(const LocateRowsArgs& args, const RowLane& lane, uint32_t lane_index,
                         uint32_t position) {
  const uint32_t index = FindSpan(args, lane, position);
  if (index == lane.span_end) return {};
  const DeviceRowSpan span = args.spans[index];
  const uint32_t slot = position - span.first_position;
  if (slot >= span.token_count) return {};
  const BlockResidency& cache = args.residency;
  if (cache.cache_slots != nullptr) {
    const uint32_t block = span.first_block + slot / kBlockSlots;
    if (block < cache.block_capacity) {
      const size_t entry = size_t{lane_index} * cache.block_capacity + block;
      if (cache.touches != nullptr) atomicAdd(&cache.touches[entry], 1u);
      const uint32_t cache_slot = cache.cache_slots[entry];
      if (cache_slot != kNotResident) {
        const size_t row = (size_t{lane_index} * cache.slot_capacity + cache_slot) * kBlockSlots +
                           slot % kBlockSlots;
        return {cache.cached_rows + row * args.row_stride_bytes, true, false};
      }
    }
  }
  return {span.rows + slot * args.row_stride_bytes, false, span.host_only != 0};
}

struct LocateShared {
  uint32_t sums[kWarps];
  uint32_t hits;
  uint32_t misses;
};

// Locates the rows of one lane with one block: appends three lists of positions, kThreads at a
// time, and omits positions without a row.
class LaneLocator {
 public:
  __device__ LaneLocator(const LocateRowsArgs& args, uint32_t lane_index)
      : args_(args), lane_(args.lanes[lane_index]), lane_index_(lane_index) {}

  __device__ void AddRange(PositionRange range) {
    Add(range.end > range.begin ? range.end - range.begin : 0,
        [&](uint32_t i) { return range.begin + i; });
  }

  __device__ void AddSelected() {
    const uint32_t* positions = args_.positions + lane_index_ * args_.position_stride;
    Add(args_.counts[lane_index_], [&](uint32_t i) { return positions[i]; });
  }

  __device__ uint32_t row_count() const { return row_count_; }

 private:
  template <typename PositionOf>
  __device__ void Add(uint32_t count, PositionOf position_of) {
    auto& shared = Shared<LocateShared>();
    for (uint32_t first = 0; first < count; first += kThreads) {
      const uint32_t i = first + threadIdx.x;
      Row row = {};
      if (i < count) row = LocateRow(args_, lane_, lane_index_, position_of(i));
      const uint32_t found = row.address != nullptr ? 1 : 0;
      const uint32_t before = BlockSumBefore(found, shared.sums);
      const uint32_t total = BlockSum(found, shared.sums);
      const uint32_t entry = row_count_ + before;
      if (found != 0 && entry < args_.address_stride) Write(row, entry);
      row_count_ = static_cast<uint32_t>(Smaller(size_t{row_count_} + total, args_.address_stride));
    }
  }

  __device__ void Write(const Row& row, uint32_t entry) {
    const size_t first = lane_index_ * args_.address_stride;
    args_.addresses[first + entry] = row.address;
    auto& shared = Shared<LocateShared>();
    atomicAdd(row.is_hit ? &shared.hits : &shared.misses, 1u);
    if (row.is_host_only && args_.missed_rows != nullptr) {
      args_.missed_rows[first + atomicAdd(&args_.missed_counts[lane_index_], 1u)] = entry;
    }
  }

  const LocateRowsArgs& args_;
  RowLane lane_;
  uint32_t lane_index_;
  uint32_t row_count_ = 0;
};

__global__ void LocateRowsKernel(LocateRowsArgs args) {
  auto& shared = Shared<LocateShared>();
  if (threadIdx.x == 0) shared.hits = shared.misses = 0;
  __syncthreads();
  LaneLocator locator(args, blockIdx.x);
  const RowLane lane = args.lanes[blockIdx.x];
  locator.AddRange(lane.before);
  locator.AddSelected();
  locator.AddRange(lane.after);
  __syncthreads();
  if (threadIdx.x != 0) return;
  args.row_counts[blockIdx.x] = locator.row_count();
  if (args.residency.hits != nullptr) atomicAdd(args.residency.hits, shared.hits);
  if (args.residency.misses != nullptr) atomicAdd(args.residency.misses, shared.misses);
}

__global__ void StageRowsKernel(StageRowsArgs args) {
  const size_t first = blockIdx.x * args.address_stride;
  const uint32_t count = args.missed_counts[blockIdx.x];
  for (uint32_t i = threadIdx.x; i < count; i += kThreads) {
    const std::byte** address = args.addresses + first + args.missed_rows[first + i];
    args.sources[first + i] = *address;
    *address = args.staging + (first + i) * args.row_stride_bytes;
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  args.source_counts[blockIdx.x] = count;
  args.missed_counts[blockIdx.x] = 0;
}

// Copies one row per warp, 16 bytes per thread, so that a row of 512 bytes is one load of the warp.
__global__ void GatherRowsKernel(GatherRowsArgs args) {
  const uint32_t count = args.row_counts[blockIdx.y];
  const auto words = static_cast<uint32_t>(args.part_bytes / sizeof(uint4));
  const size_t lane_first = blockIdx.y * args.address_stride;
  for (uint32_t i = 0; i < kRowsPerBlock / kWarps; ++i) {
    const uint32_t row = blockIdx.x * kRowsPerBlock + i * kWarps + WarpIndex();
    if (row >= count) return;
    const auto* from =
        reinterpret_cast<const uint4*>(args.addresses[lane_first + row] + args.part_begin_bytes);
    auto* to =
        reinterpret_cast<uint4*>(args.target + (lane_first + row) * args.target_stride_bytes);
    for (uint32_t word = LaneIndex(); word < words; word += kWarpThreads) to[word] = from[word];
  }
}

}  // namespace

KernelStatus LocateRows(const LocateRowsArgs& args, Stream stream) {
  if (args.lane_capacity > kMaxLanes || args.row_stride_bytes % 16 != 0) {
    return {cudaErrorInvalidValue};
  }
  return Launch(LocateRowsKernel, {dim3(args.lane_capacity), kThreads, sizeof(LocateShared)},
                stream, args);
}

KernelStatus StageRows(const StageRowsArgs& args, Stream stream) {
  if (args.lane_capacity > kMaxLanes || args.row_stride_bytes % 16 != 0) {
    return {cudaErrorInvalidValue};
  }
  return Launch(StageRowsKernel, {dim3(args.lane_capacity), kThreads, 0}, stream, args);
}

KernelStatus GatherRows(const GatherRowsArgs& args, Stream stream) {
  if (args.lane_capacity > kMaxLanes || args.part_begin_bytes % 16 != 0 ||
      args.part_bytes % 16 != 0 || args.target_stride_bytes % 16 != 0 ||
      args.target_stride_bytes < args.part_bytes) {
    return {cudaErrorInvalidValue};
  }
  const auto blocks =
      static_cast<uint32_t>((args.address_stride + kRowsPerBlock - 1) / kRowsPerBlock);
  return Launch(GatherRowsKernel, {dim3(blocks, args.lane_capacity), kThreads, 0}, stream, args);
}

}  // namespace pqcached::kernels::cuda

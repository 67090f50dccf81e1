#include "kernels/cuda/block_cache.h"

#include "kernels/cuda/launch.cuh"

namespace pqcached::kernels::cuda {
namespace {

constexpr uint32_t kThreads = 256;
constexpr uint32_t kWarps = kThreads / kWarpThreads;
constexpr uint32_t kMaxLanes = 65535;
constexpr uint32_t kNoSpan = 0xFFFFFFFFu;

// A score and a block or slot index in one integer: larger is better, 0 means none. The index is
// complemented in the lower half, so that among equal scores the lowest index wins.
using PackedScore = unsigned long long;
__device__ PackedScore PackScore(float score, uint32_t index) {
  return PackedScore{__float_as_uint(score)} << 32 | (0xFFFFFFFFu - index);  // score >= 0
}
__device__ uint32_t IndexOf(PackedScore ranked) {
  return 0xFFFFFFFFu - static_cast<uint32_t>(ranked & 0xFFFFFFFFu);
}
__device__ float ScoreOf(PackedScore ranked) {
  return __uint_as_float(static_cast<uint32_t>(ranked >> 32));
}

// Returns the largest value of the block's threads to every thread.
__device__ PackedScore BlockBest(PackedScore value, PackedScore* slots) {
  for (int distance = 16; distance > 0; distance /= 2) {
    value = Larger(value, __shfl_xor_sync(kAllLanes, value, distance));
  }
  __syncthreads();
  if (LaneIndex() == 0) slots[WarpIndex()] = value;
  __syncthreads();
  PackedScore best = slots[0];
  for (uint32_t warp = 1; warp < kWarps; ++warp) best = Larger(best, slots[warp]);
  return best;
}

// Returns the span that contains all slots of the block; kNoSpan when the block is not complete or
// only the host can read it.
__device__ uint32_t CompleteSpan(const UpdateBlocksArgs& args, const RowLane& lane,
                                 uint32_t block) {
  for (uint32_t i = lane.span_begin; i < lane.span_end; ++i) {
    const DeviceRowSpan& span = args.spans[i];
    if (block < span.first_block || span.host_only != 0) continue;
    const uint32_t block_in_span = block - span.first_block;
    if (block_in_span < span.token_count / kBlockSlots) return i;
  }
  return kNoSpan;
}

struct UpdateShared {
  PackedScore best[kWarps];
};

class LaneUpdate {
 public:
  __device__ explicit LaneUpdate(const UpdateBlocksArgs& args)
      : args_(args),
        lane_(args.lanes[blockIdx.x]),
        update_(args.state.update_counts[blockIdx.x] + 1) {
    const size_t first_block = size_t{blockIdx.x} * args.state.block_capacity;
    const size_t first_slot = size_t{blockIdx.x} * args.state.slot_capacity;
    cache_slots_ = args.state.cache_slots + first_block;
    touches_ = args.state.touches + first_block;
    frequencies_ = args.state.frequencies + first_block;
    slot_blocks_ = args.state.slot_blocks + first_slot;
    last_uses_ = args.state.last_uses + first_slot;
  }

  __device__ void Run() {
    auto& shared = Shared<UpdateShared>();
    Age();
    __syncthreads();
    uint32_t load_count = 0;
    uint32_t evicted = 0;
    while (load_count < args_.max_loads) {
      const PackedScore candidate = BlockBest(BestCandidate(), shared.best);
      if (candidate == 0) break;
      const PackedScore victim = BlockBest(BestVictim(), shared.best);
      if (victim == 0 || !MustEvict(candidate, victim)) break;
      __syncthreads();
      const uint32_t block = IndexOf(candidate);
      const uint32_t slot = IndexOf(victim);
      evicted += slot_blocks_[slot] != kNotResident ? 1 : 0;
      __syncthreads();
      if (threadIdx.x == 0) Admit(block, slot, load_count);
      ++load_count;
      __syncthreads();
    }
    for (uint32_t block = threadIdx.x; block < args_.state.block_capacity; block += kThreads) {
      touches_[block] = 0;
    }
    if (threadIdx.x != 0) return;
    args_.state.load_counts[blockIdx.x] = load_count;
    args_.state.update_counts[blockIdx.x] = update_;
    atomicAdd(args_.state.loaded, load_count);
    atomicAdd(args_.state.evicted, evicted);
  }

 private:
  static constexpr float kFreeSlot = 3e38f;

  __device__ void Age() {
    const bool keeps_all = args_.policy == CachePolicy::kFrequencyAdmission;
    for (uint32_t block = threadIdx.x; block < args_.state.block_capacity; block += kThreads) {
      const bool kept = keeps_all || cache_slots_[block] != kNotResident;
      const float before = kept ? args_.ageing * frequencies_[block] : 0.0f;
      frequencies_[block] = before + static_cast<float>(touches_[block]);
    }
    for (uint32_t slot = threadIdx.x; slot < args_.state.slot_capacity; slot += kThreads) {
      const uint32_t block = slot_blocks_[slot];
      if (block != kNotResident && touches_[block] > 0) last_uses_[slot] = update_;
    }
  }

  // Returns the best block that was requested, is not resident and is complete.
  __device__ PackedScore BestCandidate() const {
    PackedScore best = 0;
    for (uint32_t block = threadIdx.x; block < args_.state.block_capacity; block += kThreads) {
      if (touches_[block] == 0 || cache_slots_[block] != kNotResident) continue;
      const PackedScore ranked = PackScore(frequencies_[block], block);
      if (ranked > best && CompleteSpan(args_, lane_, block) != kNoSpan) best = ranked;
    }
    return best;
  }

  // Returns the best slot to evict.
  __device__ PackedScore BestVictim() const {
    PackedScore best = 0;
    for (uint32_t slot = threadIdx.x; slot < args_.state.slot_capacity; slot += kThreads) {
      best = Larger(best, PackScore(EvictionScore(slot), slot));
    }
    return best;
  }

  __device__ float EvictionScore(uint32_t slot) const {
    const uint32_t block = slot_blocks_[slot];
    if (block == kNotResident) return kFreeSlot;
    // The difference of the counts is exact as a float; the counts themselves need not be.
    if (args_.policy == CachePolicy::kLru) return static_cast<float>(update_ - last_uses_[slot]);
    return 1.0f / (1.0f + frequencies_[block]);
  }

  __device__ bool MustEvict(PackedScore candidate, PackedScore victim) const {
    const uint32_t block = slot_blocks_[IndexOf(victim)];
    if (block == kNotResident) return true;
    switch (args_.policy) {
      case CachePolicy::kLru:
        return ScoreOf(victim) > 0.0f;
      case CachePolicy::kLfu:
        return ScoreOf(candidate) > frequencies_[block];
      case CachePolicy::kFrequencyAdmission:
        return ScoreOf(candidate) > kAdmissionMargin * frequencies_[block];
    }
    return false;
  }

  __device__ void Admit(uint32_t block, uint32_t slot, uint32_t load) {
    if (slot_blocks_[slot] != kNotResident) cache_slots_[slot_blocks_[slot]] = kNotResident;
    slot_blocks_[slot] = block;
    cache_slots_[block] = slot;
    last_uses_[slot] = update_;
    args_.state.loads[size_t{blockIdx.x} * kMaxLoads + load] = {block, slot};
  }

  const UpdateBlocksArgs& args_;
  RowLane lane_;
  uint32_t update_;
  uint32_t* cache_slots_;
  uint32_t* touches_;
  float* frequencies_;
  uint32_t* slot_blocks_;
  uint32_t* last_uses_;
};

__global__ void ChooseBlocksKernel(UpdateBlocksArgs args) {
  LaneUpdate update(args);
  update.Run();
}

// Copies one block of rows, which is contiguous in the source and in the cache.
__global__ void LoadBlocksKernel(UpdateBlocksArgs args) {
  if (blockIdx.x >= args.state.load_counts[blockIdx.y]) return;
  const BlockLoad load = args.state.loads[size_t{blockIdx.y} * kMaxLoads + blockIdx.x];
  const DeviceRowSpan span = args.spans[CompleteSpan(args, args.lanes[blockIdx.y], load.block)];
  const size_t block_bytes = kBlockSlots * args.state.row_stride_bytes;
  const auto* from =
      reinterpret_cast<const uint4*>(span.rows + (load.block - span.first_block) * block_bytes);
  auto* to = reinterpret_cast<uint4*>(
      args.state.rows + (size_t{blockIdx.y} * args.state.slot_capacity + load.slot) * block_bytes);
  for (size_t i = threadIdx.x; i < block_bytes / sizeof(uint4); i += kThreads) to[i] = from[i];
}

__global__ void ForgetBlocksKernel(InvalidateBlocksArgs args) {
  const uint32_t lane = args.lane_begin + blockIdx.x;
  const BlockCacheState& state = args.state;
  for (uint32_t block = args.first_block + threadIdx.x; block < state.block_capacity;
       block += kThreads) {
    const size_t entry = size_t{lane} * state.block_capacity + block;
    state.cache_slots[entry] = kNotResident;
    state.touches[entry] = 0;
    state.frequencies[entry] = 0.0f;
  }
  for (uint32_t slot = threadIdx.x; slot < state.slot_capacity; slot += kThreads) {
    const size_t entry = size_t{lane} * state.slot_capacity + slot;
    if (args.first_block != 0 && state.slot_blocks[entry] < args.first_block) continue;
    state.slot_blocks[entry] = kNotResident;
    state.last_uses[entry] = 0;
  }
  if (args.first_block == 0 && threadIdx.x == 0) {
    state.update_counts[lane] = 0;
    state.load_counts[lane] = 0;
  }
}

bool IsValidState(const BlockCacheState& state) {
  return state.lane_capacity <= kMaxLanes && state.row_stride_bytes % 16 == 0;
}

}  // namespace

KernelStatus UpdateBlocks(const UpdateBlocksArgs& args, Stream stream) {
  if (!IsValidState(args.state) || args.max_loads > kMaxLoads) return {cudaErrorInvalidValue};
  const KernelStatus status =
      Launch(ChooseBlocksKernel, {dim3(args.state.lane_capacity), kThreads, sizeof(UpdateShared)},
             stream, args);
  if (!status.ok()) return status;
  return Launch(LoadBlocksKernel, {dim3(args.max_loads, args.state.lane_capacity), kThreads, 0},
                stream, args);
}

KernelStatus InvalidateBlocks(const InvalidateBlocksArgs& args, Stream stream) {
  if (!IsValidState(args.state) || args.lane_begin > args.lane_end ||
      args.lane_end > args.state.lane_capacity) {
    return {cudaErrorInvalidValue};
  }
  return Launch(ForgetBlocksKernel, {dim3(args.lane_end - args.lane_begin), kThreads, 0}, stream,
                args);
}

}  // namespace pqcached::kernels::cuda

// Parts that all selections on the device share: values ordered as integers, loads of the codes of
// 16 slots, and the last two steps, which count the chosen slots and write their positions.
//
// A block handles a run of chunks, one after the other. A thread handles 16 consecutive slots of a
// chunk, so that positions are written in order.
#ifndef PQCACHED_KERNELS_CUDA_SELECT_SELECT_COMMON_CUH_
#define PQCACHED_KERNELS_CUDA_SELECT_SELECT_COMMON_CUH_

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/select/select.h"

namespace pqcached::kernels::cuda {

inline constexpr uint32_t kSlotsPerThread = 16;
inline constexpr uint32_t kChunkThreads = kChunkTokens / kSlotsPerThread;
inline constexpr uint32_t kChunkWarps = kChunkThreads / kWarpThreads;
inline constexpr uint32_t kMaxSelectGroup = 64;
inline constexpr uint32_t kMaxLanes = 65535;
inline constexpr size_t kScratchAlignment = 256;

// The chunks of one block: one as long as there are few, so that they spread over the device;
// several where there are many, so that what a block prepares for a lane serves more tokens.
struct ChunkRun {
  uint32_t begin;
  uint32_t end;
};
__host__ __device__ constexpr uint32_t ChunksPerBlock(uint32_t chunk_capacity) {
  constexpr uint32_t kManyChunks = 4096;
  constexpr uint32_t kMost = 16;
  return Larger(1u, Smaller(kMost, chunk_capacity / kManyChunks));
}
constexpr uint32_t ChunkBlocks(uint32_t chunk_capacity) {
  return (chunk_capacity + ChunksPerBlock(chunk_capacity) - 1) / ChunksPerBlock(chunk_capacity);
}
__device__ inline ChunkRun RunOfBlock(uint32_t chunk_capacity) {
  const uint32_t count = ChunksPerBlock(chunk_capacity);
  return {blockIdx.x * count, Smaller(chunk_capacity, (blockIdx.x + 1) * count)};
}

constexpr size_t ScratchPart(size_t bytes) {
  return (bytes + kScratchAlignment - 1) / kScratchAlignment * kScratchAlignment;
}

// Cuts a buffer into aligned parts.
class ScratchParts {
 public:
  explicit ScratchParts(void* scratch) : next_(static_cast<std::byte*>(scratch)) {}

  template <typename T>
  T* Take(size_t count) {
    std::byte* part = next_;
    next_ += ScratchPart(count * sizeof(T));
    return reinterpret_cast<T*>(part);
  }

 private:
  std::byte* next_;
};

// Maps finite values to integers of the same order. Equal values have equal keys, zeros of both
// signs included. No value has the key kNoKey.
inline constexpr uint32_t kNoKey = 0xFFFFFFFFu;
__device__ inline uint32_t OrderedKey(float value) {
  const uint32_t bits = value == 0.0f ? 0u : __float_as_uint(value);
  return (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}

// The slots of a chunk that this thread handles.
struct ThreadSlots {
  uint32_t begin;
  uint32_t count;  // at most kSlotsPerThread; 0: none
};
__device__ inline ThreadSlots SlotsOfThread(const SelectChunk& chunk) {
  const uint32_t begin = chunk.slot_begin + threadIdx.x * kSlotsPerThread;
  if (begin >= chunk.slot_end) return {begin, 0};
  return {begin, Smaller(kSlotsPerThread, chunk.slot_end - begin)};
}

// Sets bytes[i] to the plane's byte at slot begin + i.
__device__ inline void LoadPlane(const uint8_t* plane, ThreadSlots slots,
                                 uint8_t (&bytes)[kSlotsPerThread]) {
  const uint8_t* from = plane + slots.begin;
  if (slots.count == kSlotsPerThread && reinterpret_cast<uintptr_t>(from) % 16 == 0) {
    const uint4 words = *reinterpret_cast<const uint4*>(from);
    const uint32_t parts[4] = {words.x, words.y, words.z, words.w};
    PQC_UNROLL
    for (uint32_t i = 0; i < kSlotsPerThread; ++i) {
      bytes[i] = static_cast<uint8_t>(parts[i / 4] >> i % 4 * 8);
    }
    return;
  }
  PQC_UNROLL
  for (uint32_t i = 0; i < kSlotsPerThread; ++i) bytes[i] = i < slots.count ? from[i] : uint8_t{0};
}

// Clamped tables of one lane and codebook. Under kMeanLogit they look like one head, the sum of the
// group.
struct TableView {
  const float* entries;
  uint32_t entry_count;  // per head
  uint32_t head_count;   // heads after aggregation: 1 under kMeanLogit
  uint32_t summed_count;

  __device__ float Entry(uint32_t head, uint32_t index) const {
    float sum = ClampEntry(entries[head * entry_count + index]);
    if (summed_count == 1) return sum;
    for (uint32_t i = 1; i < summed_count; ++i) sum += ClampEntry(entries[i * entry_count + index]);
    return ClampEntry(sum);
  }
};
__device__ inline TableView TablesOf(const float* tables, uint32_t table, PqGeometry geometry,
                                     uint32_t group_size, GroupRule rule) {
  const uint32_t entry_count = geometry.subspace_count << geometry.bits;
  const bool summed = rule == GroupRule::kMeanLogit;
  return {tables + size_t{table} * group_size * entry_count, entry_count, summed ? 1 : group_size,
          summed ? group_size : 1};
}

// Normaliser of one head, in the forms that the rules need.
struct HeadNormaliser {
  float max;
  float inverse_sum;
  float log_sum;
};

// Adds one head's logit to the value of a token; `value` is not read for head 0.
__device__ inline float AddToValue(GroupRule rule, uint32_t head_count, uint32_t head, float value,
                                   float logit, const HeadNormaliser& normaliser) {
  if (head_count == 1) return logit;
  switch (rule) {
    case GroupRule::kSumSoftmax: {
      const float exponent = logit - normaliser.max;
      const float weight = exponent < kMinExponent ? 0.0f : expf(exponent) * normaliser.inverse_sum;
      return head == 0 ? weight : value + weight;
    }
    case GroupRule::kMaxSoftmax: {
      const float log_weight = (logit - normaliser.max) - normaliser.log_sum;
      return head == 0 ? log_weight : Larger(value, log_weight);
    }
    case GroupRule::kMeanLogit:
      return head == 0 ? logit : value + logit;
    case GroupRule::kMaxLogit:
      return head == 0 ? logit : Larger(value, logit);
  }
  return value;
}

constexpr bool ReadsNormalisers(GroupRule rule, uint32_t head_count) {
  return head_count > 1 && (rule == GroupRule::kSumSoftmax || rule == GroupRule::kMaxSoftmax);
}

// Counts over all slots of a chunk, or over those before a given slot.
struct SelectedSlotCounts {
  uint32_t above;
  uint32_t equal;
};

// Threshold of a lane.
struct LaneThreshold {
  uint32_t key;          // key of the k-th largest value; kNoKey: nothing is selected
  uint32_t equal_quota;  // number of slots equal to the threshold that are selected
};

inline constexpr uint32_t kDigitBins = 256;
struct RadixShared {
  uint32_t bins[kDigitBins];
  uint32_t digit;
  uint32_t above;
};

// Adds weights to bins, with all threads of a warp. `in_groups`: one addition for each digit that
// occurs in the warp, which is faster where few digits do (additions to one address wait for each
// other).
__device__ inline void AddToBins(uint32_t* bins, uint32_t digit, uint32_t weight, bool in_groups) {
  if (!in_groups) {
    if (weight > 0) atomicAdd(&bins[digit], weight);
    return;
  }
  uint32_t left = __ballot_sync(kAllLanes, weight > 0);
  while (left != 0) {
    const int leader = __ffs(left) - 1;
    const uint32_t digit_of = __shfl_sync(kAllLanes, digit, leader);
    const bool is_same = weight > 0 && digit == digit_of;
    const uint32_t sum = __reduce_add_sync(kAllLanes, is_same ? weight : 0u);
    if (LaneIndex() == static_cast<uint32_t>(leader)) atomicAdd(&bins[digit_of], sum);
    left &= ~__ballot_sync(kAllLanes, is_same);
  }
}

// Finds the k-th largest key by radix select, from the highest digit down, with all threads of a
// block of at least kDigitBins. Entry i has key(i) and counts weight(i) times. `slots` has one
// entry per warp. REQUIRES: 1 <= k <= sum of the weights.
template <typename Key, typename Weight>
__device__ LaneThreshold FindKthKey(uint32_t count, uint32_t k, const Key& key,
                                    const Weight& weight, RadixShared& shared, uint32_t* slots) {
  uint32_t prefix = 0;
  uint32_t left = k;
  for (uint32_t shift = 24;; shift -= 8) {
    for (uint32_t i = threadIdx.x; i < kDigitBins; i += blockDim.x) shared.bins[i] = 0;
    __syncthreads();
    for (uint32_t first = 0; first < count; first += blockDim.x) {
      const uint32_t i = first + threadIdx.x;
      uint32_t weight_of = i < count ? weight(i) : 0;
      const uint32_t key_of = weight_of > 0 ? key(i) : 0;
      if (uint64_t{key_of} >> (shift + 8) != uint64_t{prefix} >> (shift + 8)) weight_of = 0;
      AddToBins(shared.bins, key_of >> shift & 255u, weight_of, shift == 24);
    }
    __syncthreads();
    const uint32_t bin = kDigitBins - 1 - threadIdx.x;  // thread 0 takes the largest digit
    const uint32_t total = threadIdx.x < kDigitBins ? shared.bins[bin] : 0;
    const uint32_t above = BlockSumBefore(total, slots);
    if (above < left && left <= above + total) {
      shared.digit = bin;
      shared.above = above;
    }
    __syncthreads();
    prefix |= shared.digit << shift;
    left -= shared.above;
    if (shift == 0) return {prefix, left};
    __syncthreads();
  }
}

// Comparison of this thread's slots with the threshold: bit i for slot i.
struct SlotClasses {
  uint32_t above;
  uint32_t equal;
};

// What the last two steps share, for each chunk.
struct ClassScratch {
  SelectedSlotCounts* counts;  // [chunk]
  uint32_t* classes;           // [chunk, kChunkThreads]: `above`, and `equal` in the high half
};
constexpr size_t ClassScratchBytes(size_t chunk_capacity) {
  return ScratchPart(chunk_capacity * sizeof(SelectedSlotCounts)) +
         ScratchPart(chunk_capacity * kChunkThreads * sizeof(uint32_t));
}
inline ClassScratch CutClassScratch(ScratchParts& parts, size_t chunk_capacity) {
  ClassScratch cut;
  cut.counts = parts.Take<SelectedSlotCounts>(chunk_capacity);
  cut.classes = parts.Take<uint32_t>(chunk_capacity * kChunkThreads);
  return cut;
}

// Keeps the classes of a chunk's slots, and counts them.
__device__ inline void KeepClasses(SlotClasses classes, uint32_t chunk, const ClassScratch& scratch,
                                   uint32_t* slots) {
  scratch.classes[size_t{chunk} * kChunkThreads + threadIdx.x] =
      classes.above | classes.equal << kSlotsPerThread;
  const uint32_t above = BlockSum(static_cast<uint32_t>(__popc(classes.above)), slots);
  const uint32_t equal = BlockSum(static_cast<uint32_t>(__popc(classes.equal)), slots);
  if (threadIdx.x == 0) scratch.counts[chunk] = {above, equal};
}

// Writes the positions of the block's chunk after those of the lane's earlier chunks.
__device__ inline void EmitSelectedSlots(const SelectChunk& chunk, const SelectLane& lane,
                                         LaneThreshold threshold, const ClassScratch& scratch,
                                         const Selection& selection, uint32_t* slots) {
  const SelectedSlotCounts* const counts = scratch.counts;
  if (counts[blockIdx.x].above + counts[blockIdx.x].equal == 0) return;
  const uint32_t kept = scratch.classes[size_t{blockIdx.x} * kChunkThreads + threadIdx.x];
  const SlotClasses classes = {kept & ((1u << kSlotsPerThread) - 1), kept >> kSlotsPerThread};
  SelectedSlotCounts before = {0, 0};
  for (uint32_t i = lane.chunk_begin + threadIdx.x; i < blockIdx.x; i += kChunkThreads) {
    before.above += counts[i].above;
    before.equal += counts[i].equal;
  }
  before.above = BlockSum(before.above, slots);
  before.equal = BlockSum(before.equal, slots);
  const auto above_count = static_cast<uint32_t>(__popc(classes.above));
  const auto equal_count = static_cast<uint32_t>(__popc(classes.equal));
  // Both counts of a chunk fit into 16 bits.
  const uint32_t packed = BlockSumBefore(above_count << 16 | equal_count, slots);
  before.above += packed >> 16;
  before.equal += packed & 0xFFFFu;

  uint32_t* const out = selection.positions + chunk.lane * selection.position_stride;
  const uint32_t first = chunk.first_position + SlotsOfThread(chunk).begin;
  PQC_UNROLL
  for (uint32_t i = 0; i < kSlotsPerThread; ++i) {
    const bool above = (classes.above >> i & 1u) != 0;
    const bool equal = (classes.equal >> i & 1u) != 0;
    if (above || (equal && before.equal < threshold.equal_quota)) {
      out[before.above + Smaller(before.equal, threshold.equal_quota)] = first + i;
    }
    before.above += above ? 1 : 0;
    before.equal += equal ? 1 : 0;
  }
}

}  // namespace pqcached::kernels::cuda

#endif  // PQCACHED_KERNELS_CUDA_SELECT_SELECT_COMMON_CUH_

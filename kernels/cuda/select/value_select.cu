// Selection by the values of all tokens.
//
// Speed: codes (or logits) are read twice, once for the normalisers and once for the values,
// followed by four passes over keys of 4 bytes per token. Table look-ups use shared memory where
// the tables fit.
#include "kernels/cuda/select/value_select.cuh"

#include "kernels/cuda/select/select_common.cuh"
#include "kernels/cuda/select/table_logits.cuh"

namespace pqcached::kernels::cuda {
namespace {

// Digits of a key, from the highest: 11, 11 and 10 bits.
constexpr uint32_t kDigitCount = 3;
constexpr uint32_t kMaxBins = 2048;

__host__ __device__ constexpr uint32_t DigitShift(uint32_t digit) {
  return digit == 0 ? 21 : digit == 1 ? 10 : 0;
}
__host__ __device__ constexpr uint32_t DigitBins(uint32_t digit) {
  return digit == 2 ? 1024 : 2048;
}

struct ValueScratch {
  uint32_t* bins;  // [digit, lane, kMaxBins]: histogram of keys with the same higher digits
  PartialNormaliser* partials;  // [chunk, G]
  uint32_t* keys;               // [chunk, kChunkTokens]
  LaneThreshold* progress;      // [digit, lane]: key prefix found so far, and tokens left to select
  SelectedSlotCounts* counts;   // [chunk]
};

size_t BinsBytes(const ScoreSelectShape& shape) {
  return ScratchPart(size_t{kDigitCount} * shape.lane_capacity * kMaxBins * sizeof(uint32_t));
}

ValueScratch CutScratch(const ScoreSelectShape& shape, void* scratch) {
  ScratchParts parts(scratch);
  ValueScratch cut;
  cut.bins = parts.Take<uint32_t>(size_t{kDigitCount} * shape.lane_capacity * kMaxBins);
  cut.partials = parts.Take<PartialNormaliser>(size_t{shape.chunk_capacity} * shape.group_size);
  cut.keys = parts.Take<uint32_t>(size_t{shape.chunk_capacity} * kChunkTokens);
  cut.progress = parts.Take<LaneThreshold>(size_t{kDigitCount} * shape.lane_capacity);
  cut.counts = parts.Take<SelectedSlotCounts>(shape.chunk_capacity);
  return cut;
}

// Source of given logits (ScoreSelect).
class GivenLogits {
 public:
  __device__ GivenLogits(const ValueSelectArgs& args, const SelectChunk& chunk, float*)
      : head_count_(args.group_size), chunk_(chunk), slots_(SlotsOfThread(chunk)) {}

  __device__ uint32_t head_count() const { return head_count_; }
  __device__ float Logit(uint32_t head, uint32_t i) const {
    return ClampLogit(chunk_.logits[head * chunk_.stride + slots_.begin + i]);
  }

 private:
  uint32_t head_count_;
  const SelectChunk& chunk_;
  ThreadSlots slots_;
};

// Source of logits that are summed from tables (PqSelect). All threads of the block must construct
// it together.
class CodeLogits : public TableLogits {
 public:
  __device__ CodeLogits(const ValueSelectArgs& args, const SelectChunk& chunk, float* shared)
      : TableLogits(args.geometry,
                    TablesOf(args.tables, chunk.table, args.geometry, args.group_size, args.rule),
                    chunk, shared) {}
};

struct LogitShared {
  float floats[kChunkWarps];
  uint32_t words[kChunkWarps];
  HeadNormaliser normalisers[kMaxSelectGroup];
  uint32_t bins[kMaxBins];
  float tables[kSharedTableFloats];
};

// Computes the maximum and the sum of exponentials of every head over one chunk.
template <typename Logits>
__global__ void NormaliseChunksKernel(ValueSelectArgs args, ValueScratch scratch) {
  const SelectChunk chunk = args.candidates.chunks[blockIdx.x];
  if (chunk.lane == kNoLane) return;
  auto& shared = Shared<LogitShared>();
  const Logits logits(args, chunk, shared.tables);
  NormaliseChunk(logits, SlotsOfThread(chunk).count, shared.floats,
                 scratch.partials + size_t{blockIdx.x} * args.group_size);
}

// Adds the block's histogram in shared memory to that of the lane.
__device__ inline void AddBins(const uint32_t* block_bins, uint32_t bin_count, uint32_t* bins) {
  __syncthreads();
  for (uint32_t i = threadIdx.x; i < bin_count; i += kChunkThreads) {
    if (block_bins[i] > 0) atomicAdd(&bins[i], block_bins[i]);
  }
}

__device__ inline uint32_t* BinsOf(const ValueScratch& scratch, uint32_t digit, uint32_t lane,
                                   uint32_t lane_capacity) {
  return scratch.bins + (size_t{digit} * lane_capacity + lane) * kMaxBins;
}

// Computes the keys of all tokens of a chunk, and the histogram of their first digits.
template <typename Logits>
__global__ void FindValuesKernel(ValueSelectArgs args, ValueScratch scratch) {
  const SelectChunk chunk = args.candidates.chunks[blockIdx.x];
  if (chunk.lane == kNoLane) return;
  auto& shared = Shared<LogitShared>();
  const SelectLane lane = args.candidates.lanes[chunk.lane];
  const Logits logits(args, chunk, shared.tables);
  const uint32_t head_count = logits.head_count();
  const bool normalised = ReadsNormalisers(args.rule, head_count);
  if (normalised || args.lse != nullptr) {
    for (uint32_t head = WarpIndex(); head < head_count; head += kChunkWarps) {
      const HeadNormaliser normaliser =
          MergeNormalisers(scratch.partials, lane, args.group_size, head);
      if (LaneIndex() == 0) shared.normalisers[head] = normaliser;
    }
  }
  for (uint32_t i = threadIdx.x; i < DigitBins(0); i += kChunkThreads) shared.bins[i] = 0;
  __syncthreads();
  if (args.lse != nullptr && blockIdx.x == lane.chunk_begin && threadIdx.x < head_count) {
    const HeadNormaliser& normaliser = shared.normalisers[threadIdx.x];
    args.lse[size_t{chunk.lane} * args.group_size + threadIdx.x] =
        normaliser.max + normaliser.log_sum;
  }
  const ThreadSlots slots = SlotsOfThread(chunk);
  uint32_t* const keys = scratch.keys + size_t{blockIdx.x} * kChunkTokens;
  for (uint32_t i = 0; i < slots.count; ++i) {
    float value = 0.0f;
    for (uint32_t head = 0; head < head_count; ++head) {
      value = AddToValue(args.rule, head_count, head, value, logits.Logit(head, i),
                         shared.normalisers[head]);
    }
    const uint32_t key = OrderedKey(value);
    keys[threadIdx.x * kSlotsPerThread + i] = key;
    atomicAdd(&shared.bins[key >> DigitShift(0)], 1u);
  }
  AddBins(shared.bins, DigitBins(0), BinsOf(scratch, 0, chunk.lane, args.candidates.lane_capacity));
}

struct DigitShared {
  uint32_t words[kChunkWarps];
  uint32_t bins[kMaxBins];
  uint32_t digit;
  uint32_t above;
  uint32_t total;
};

// Finds one digit of the lane's k-th largest key from the histogram of the previous kernel. All
// blocks of a lane find the same digit; the first block stores it for later kernels.
__device__ LaneThreshold FindDigit(const ValueSelectArgs& args, const ValueScratch& scratch,
                                   uint32_t lane_index, uint32_t digit) {
  auto& shared = Shared<DigitShared>();
  const uint32_t lane_capacity = args.candidates.lane_capacity;
  const SelectLane lane = args.candidates.lanes[lane_index];
  const uint32_t* bins = BinsOf(scratch, digit, lane_index, lane_capacity);
  const uint32_t bins_per_thread = DigitBins(digit) / kChunkThreads;
  // thread 0 takes the largest digits
  const uint32_t last = DigitBins(digit) - 1 - threadIdx.x * bins_per_thread;
  uint32_t tokens = 0;
  for (uint32_t i = 0; i < bins_per_thread; ++i) tokens += bins[last - i];
  uint32_t above = BlockSumBefore(tokens, shared.words);
  if (threadIdx.x == kChunkThreads - 1) shared.total = above + tokens;
  __syncthreads();
  LaneThreshold progress = {0, Smaller(lane.k, shared.total)};
  if (digit > 0) progress = scratch.progress[(digit - 1) * lane_capacity + lane_index];
  if (progress.equal_quota == 0) {
    progress = {kNoKey, 0};
  } else {
    for (uint32_t i = 0; i < bins_per_thread; ++i) {
      const uint32_t count = bins[last - i];
      if (above < progress.equal_quota && progress.equal_quota <= above + count) {
        shared.digit = last - i;
        shared.above = above;
      }
      above += count;
    }
    __syncthreads();
    progress = {progress.key | shared.digit << DigitShift(digit),
                progress.equal_quota - shared.above};
  }
  __syncthreads();
  if (blockIdx.x == lane.chunk_begin && threadIdx.x == 0) {
    scratch.progress[digit * lane_capacity + lane_index] = progress;
    if (digit == 0) args.selection.counts[lane_index] = Smaller(lane.k, shared.total);
  }
  return progress;
}

// Counts each value of `digit` among the keys that share the digits found so far.
__global__ void CountDigitsKernel(ValueSelectArgs args, ValueScratch scratch, uint32_t digit) {
  const SelectChunk chunk = args.candidates.chunks[blockIdx.x];
  if (chunk.lane == kNoLane) return;
  auto& shared = Shared<DigitShared>();
  const LaneThreshold progress = FindDigit(args, scratch, chunk.lane, digit - 1);
  for (uint32_t i = threadIdx.x; i < DigitBins(digit); i += kChunkThreads) shared.bins[i] = 0;
  __syncthreads();
  const uint32_t shift_before = DigitShift(digit - 1);
  const uint32_t* const keys = scratch.keys + size_t{blockIdx.x} * kChunkTokens;
  const uint32_t count = chunk.slot_end - chunk.slot_begin;
  for (uint32_t i = threadIdx.x; i < count; i += kChunkThreads) {
    if (keys[i] >> shift_before != progress.key >> shift_before) continue;
    atomicAdd(&shared.bins[keys[i] >> DigitShift(digit) & (DigitBins(digit) - 1)], 1u);
  }
  AddBins(shared.bins, DigitBins(digit),
          BinsOf(scratch, digit, chunk.lane, args.candidates.lane_capacity));
}

__device__ SlotClasses ClassifyByKey(const ValueScratch& scratch, const SelectChunk& chunk,
                                     LaneThreshold threshold) {
  const uint32_t* keys =
      scratch.keys + size_t{blockIdx.x} * kChunkTokens + threadIdx.x * kSlotsPerThread;
  const uint32_t count = SlotsOfThread(chunk).count;
  SlotClasses classes = {0, 0};
  for (uint32_t i = 0; i < count; ++i) {
    classes.above |= (keys[i] > threshold.key ? 1u : 0u) << i;
    classes.equal |= (keys[i] == threshold.key ? 1u : 0u) << i;
  }
  return classes;
}

__global__ void CountValuesKernel(ValueSelectArgs args, ValueScratch scratch) {
  const SelectChunk chunk = args.candidates.chunks[blockIdx.x];
  if (chunk.lane == kNoLane) return;
  const LaneThreshold threshold = FindDigit(args, scratch, chunk.lane, kDigitCount - 1);
  CountSelectedSlots(ClassifyByKey(scratch, chunk, threshold), &scratch.counts[blockIdx.x],
                     Shared<DigitShared>().words);
}

__global__ void EmitValuesKernel(ValueSelectArgs args, ValueScratch scratch) {
  const SelectChunk chunk = args.candidates.chunks[blockIdx.x];
  if (chunk.lane == kNoLane) return;
  const LaneThreshold threshold =
      scratch.progress[(kDigitCount - 1) * args.candidates.lane_capacity + chunk.lane];
  EmitSelectedSlots(chunk, args.candidates.lanes[chunk.lane], threshold,
                    ClassifyByKey(scratch, chunk, threshold), scratch.counts, args.selection,
                    Shared<DigitShared>().words);
}

template <typename Logits>
KernelStatus LaunchAll(const ValueSelectArgs& args, Stream stream) {
  const ScoreSelectShape shape = {args.group_size, args.candidates.lane_capacity,
                                  args.candidates.chunk_capacity};
  const ValueScratch scratch = CutScratch(shape, args.scratch);
  const dim3 chunks(args.candidates.chunk_capacity);
  const LaunchShape logit_launch = {chunks, kChunkThreads, sizeof(LogitShared)};
  const LaunchShape digit_launch = {chunks, kChunkThreads, sizeof(DigitShared)};
  // Clears the counts, because a lane without chunks has no block that would write its count.
  KernelStatus status =
      Clear(args.selection.counts, size_t{shape.lane_capacity} * sizeof(uint32_t), stream);
  if (status.ok()) status = Clear(scratch.bins, BinsBytes(shape), stream);
  if (status.ok() && (args.lse != nullptr || ReadsNormalisers(args.rule, args.group_size))) {
    status = Launch(NormaliseChunksKernel<Logits>, logit_launch, stream, args, scratch);
  }
  if (status.ok()) {
    status = Launch(FindValuesKernel<Logits>, logit_launch, stream, args, scratch);
  }
  for (uint32_t digit = 1; status.ok() && digit < kDigitCount; ++digit) {
    status = Launch(CountDigitsKernel, digit_launch, stream, args, scratch, digit);
  }
  if (status.ok()) status = Launch(CountValuesKernel, digit_launch, stream, args, scratch);
  if (status.ok()) status = Launch(EmitValuesKernel, digit_launch, stream, args, scratch);
  return status;
}

}  // namespace

KernelStatus SelectByValues(const ValueSelectArgs& args, Stream stream) {
  return args.tables != nullptr ? LaunchAll<CodeLogits>(args, stream)
                                : LaunchAll<GivenLogits>(args, stream);
}

size_t ScoreSelectScratchBytes(const ScoreSelectShape& shape) {
  return BinsBytes(shape) +
         ScratchPart(size_t{shape.chunk_capacity} * shape.group_size * sizeof(PartialNormaliser)) +
         ScratchPart(size_t{shape.chunk_capacity} * kChunkTokens * sizeof(uint32_t)) +
         ScratchPart(size_t{kDigitCount} * shape.lane_capacity * sizeof(LaneThreshold)) +
         ScratchPart(shape.chunk_capacity * sizeof(SelectedSlotCounts));
}

KernelStatus ScoreSelect(const ScoreSelectArgs& args, Stream stream) {
  const ScoreSelectShape shape = {args.group_size, args.candidates.lane_capacity,
                                  args.candidates.chunk_capacity};
  if (args.group_size == 0 || args.group_size > kMaxSelectGroup ||
      shape.lane_capacity > kMaxLanes || args.scratch_bytes < ScoreSelectScratchBytes(shape)) {
    return {cudaErrorInvalidValue};
  }
  return SelectByValues({.group_size = args.group_size,
                         .rule = args.rule,
                         .candidates = args.candidates,
                         .geometry = {},
                         .tables = nullptr,
                         .selection = args.selection,
                         .lse = args.lse,
                         .scratch = args.scratch},
                        stream);
}

}  // namespace pqcached::kernels::cuda

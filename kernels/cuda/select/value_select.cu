// Selection by the values of all tokens.
//
// Speed: codes (or logits) are read twice, once for the normalisers and once for the values,
// followed by three passes over keys of 4 bytes per token. Look-ups in shared memory are the limit
// for codes of several bytes per token: a warp's look-ups of 16 bytes take 4 cycles without
// conflicts between banks, about 10 with random codes.
#include "kernels/cuda/select/value_select.cuh"

#include "kernels/cuda/select/digits.cuh"
#include "kernels/cuda/select/select_common.cuh"
#include "kernels/cuda/select/table_logits.cuh"

namespace pqcached::kernels::cuda {
namespace {

struct ValueScratch {
  DigitScratch digits;
  PartialNormaliser* partials;  // [chunk, G]
  uint32_t* keys;               // [chunk, kChunkTokens]
  ClassScratch classes;
};

ValueScratch CutScratch(const ScoreSelectShape& shape, void* scratch) {
  ScratchParts parts(scratch);
  ValueScratch cut;
  cut.digits = CutDigitScratch(parts, shape.lane_capacity);
  cut.partials = parts.Take<PartialNormaliser>(size_t{shape.chunk_capacity} * shape.group_size);
  cut.keys = parts.Take<uint32_t>(size_t{shape.chunk_capacity} * kChunkTokens);
  cut.classes = CutClassScratch(parts, shape.chunk_capacity);
  return cut;
}

// Source of given logits (ScoreSelect): the interface of TableLogits.
template <uint32_t kHeads>
class GivenLogits {
 public:
  static constexpr uint32_t kLoadedHeads = kHeads;

  __device__ GivenLogits(const ValueSelectArgs& args, float*) : head_count_(args.group_size) {}

  __device__ void Begin(const SelectChunk& chunk) {
    chunk_ = chunk;
    slots_ = SlotsOfThread(chunk);
  }
  __device__ uint32_t head_count() const { return head_count_; }
  __device__ uint32_t slot_count() const { return slots_.count; }

  __device__ void Load(uint32_t first_head, HeadFloats<kHeads> (&logits)[kSlotsPerThread]) const {
    PQC_UNROLL
    for (uint32_t head = 0; head < kHeads; ++head) {
      const bool exists = first_head + head < head_count_;
      const float* from = chunk_.logits + (first_head + head) * chunk_.stride + slots_.begin;
      PQC_UNROLL
      for (uint32_t i = 0; i < kSlotsPerThread; ++i) {
        logits[i].of[head] = exists && i < slots_.count ? ClampLogit(from[i]) : 0.0f;
      }
    }
  }

 private:
  uint32_t head_count_;
  SelectChunk chunk_;
  ThreadSlots slots_ = {0, 0};
};

// Source of logits that are summed from tables (PqSelect).
template <uint32_t kHeads>
class CodeLogits : public TableLogits<kHeads> {
 public:
  __device__ CodeLogits(const ValueSelectArgs& args, float* shared)
      : TableLogits<kHeads>(args.geometry, args.tables, args.group_size, args.rule, shared) {}
};

__device__ bool IsFirstOfLane(const ValueSelectArgs& args, uint32_t lane, uint32_t chunk) {
  return chunk == args.candidates.lanes[lane].chunk_begin;
}

struct LogitShared {
  NormaliseShared normalise;
  HeadNormaliser normalisers[kMaxSelectGroup];
  uint32_t bins[kMaxBins];
  HeadFloats<kHeadsAtOnce> tables[kSharedTableFloats / kHeadsAtOnce];
};

// Computes the maximum and the sum of exponentials of every head over each chunk.
template <typename Logits>
__global__ void __launch_bounds__(kChunkThreads, 2)
    NormaliseChunksKernel(ValueSelectArgs args, ValueScratch scratch) {
  auto& shared = Shared<LogitShared>();
  const ChunkRun run = RunOfBlock(args.candidates.chunk_capacity);
  Logits logits(args, shared.tables[0].of);
  for (uint32_t i = run.begin; i < run.end; ++i) {
    const SelectChunk chunk = args.candidates.chunks[i];
    if (chunk.lane == kNoLane) continue;
    logits.Begin(chunk);
    NormaliseChunk(logits, shared.normalise, scratch.partials + size_t{i} * args.group_size);
  }
}

// Computes the keys of all tokens of a run of chunks, and the histograms of their first digits.
template <typename Logits>
class KeyFinder {
 public:
  __device__ KeyFinder(const ValueSelectArgs& args, const ValueScratch& scratch)
      : args_(args), scratch_(scratch), logits_(args, Shared<LogitShared>().tables[0].of) {}

  __device__ void Run() {
    const ChunkRun run = RunOfBlock(args_.candidates.chunk_capacity);
    for (uint32_t i = run.begin; i < run.end; ++i) {
      const SelectChunk chunk = args_.candidates.chunks[i];
      if (chunk.lane == kNoLane) continue;
      if (chunk.lane != lane_) {
        EndLane();
        lane_ = chunk.lane;
        BeginLane(i);
      }
      logits_.Begin(chunk);
      FindKeys(scratch_.keys + size_t{i} * kChunkTokens);
    }
    EndLane();
  }

 private:
  static constexpr uint32_t kHeads = Logits::kLoadedHeads;

  __device__ void BeginLane(uint32_t chunk) {
    auto& shared = Shared<LogitShared>();
    const SelectLane lane = args_.candidates.lanes[lane_];
    const uint32_t head_count = logits_.head_count();
    __syncthreads();  // the bins and normalisers of the lane before have been read
    if (ReadsNormalisers(args_.rule, head_count) || args_.lse != nullptr) {
      for (uint32_t head = WarpIndex(); head < head_count; head += kChunkWarps) {
        const HeadNormaliser normaliser = MergeNormalisers(scratch_.partials, lane.chunk_begin,
                                                           lane.chunk_end, args_.group_size, head);
        if (LaneIndex() == 0) shared.normalisers[head] = normaliser;
      }
    }
    for (uint32_t i = threadIdx.x; i < DigitBins(0); i += kChunkThreads) shared.bins[i] = 0;
    __syncthreads();
    if (args_.lse != nullptr && chunk == lane.chunk_begin && threadIdx.x < head_count) {
      const HeadNormaliser& normaliser = shared.normalisers[threadIdx.x];
      args_.lse[size_t{lane_} * args_.group_size + threadIdx.x] =
          normaliser.max + normaliser.log_sum;
    }
  }

  __device__ void EndLane() {
    if (lane_ == kNoLane) return;
    LaneDigits(args_.candidates, scratch_.digits, lane_).AddBins(Shared<LogitShared>().bins, 0);
  }

  __device__ void FindKeys(uint32_t* keys) {
    auto& shared = Shared<LogitShared>();
    const uint32_t head_count = logits_.head_count();
    float values[kSlotsPerThread] = {};
    for (uint32_t first = 0; first < head_count; first += kHeads) {
      HeadFloats<kHeads> of_slots[kSlotsPerThread];
      logits_.Load(first, of_slots);
      AddHeads(args_.rule, head_count, first, of_slots, shared.normalisers, values);
    }
    const uint32_t slot_count = logits_.slot_count();
    auto* const to = reinterpret_cast<uint4*>(keys) + threadIdx.x * (kSlotsPerThread / 4);
    PQC_UNROLL
    for (uint32_t i = 0; i < kSlotsPerThread; i += 4) {
      uint32_t four[4];
      PQC_UNROLL
      for (uint32_t j = 0; j < 4; ++j) {
        four[j] = OrderedKey(values[i + j]);
        if (i + j < slot_count) atomicAdd(&shared.bins[four[j] >> DigitShift(0)], 1u);
      }
      if (i < slot_count) to[i / 4] = make_uint4(four[0], four[1], four[2], four[3]);
    }
  }

  const ValueSelectArgs& args_;
  const ValueScratch& scratch_;
  Logits logits_;
  uint32_t lane_ = kNoLane;
};

template <typename Logits>
__global__ void __launch_bounds__(kChunkThreads, 2)
    FindKeysKernel(ValueSelectArgs args, ValueScratch scratch) {
  KeyFinder<Logits>(args, scratch).Run();
}

// Counts each value of `digit` among the keys that share the digits found so far.
__global__ void CountDigitsKernel(ValueSelectArgs args, ValueScratch scratch, uint32_t digit) {
  auto& shared = Shared<DigitShared>();
  const ChunkRun run = RunOfBlock(args.candidates.chunk_capacity);
  LaneThreshold progress = {kNoKey, 0};
  uint32_t lane = kNoLane;
  const auto end_lane = [&] {
    if (lane == kNoLane) return;
    LaneDigits(args.candidates, scratch.digits, lane).AddBins(shared.bins, digit);
  };
  for (uint32_t chunk_index = run.begin; chunk_index < run.end; ++chunk_index) {
    const SelectChunk chunk = args.candidates.chunks[chunk_index];
    if (chunk.lane == kNoLane) continue;
    if (chunk.lane != lane) {
      end_lane();
      lane = chunk.lane;
      __syncthreads();  // the bins of the lane before have been read
      progress = LaneDigits(args.candidates, scratch.digits, lane)
                     .Find(digit - 1, shared, IsFirstOfLane(args, lane, chunk_index),
                           args.selection.counts);
      for (uint32_t i = threadIdx.x; i < DigitBins(digit); i += kChunkThreads) shared.bins[i] = 0;
      __syncthreads();
    }
    const uint32_t* const keys = scratch.keys + size_t{chunk_index} * kChunkTokens;
    const uint32_t count = chunk.slot_end - chunk.slot_begin;
    for (uint32_t i = threadIdx.x; i < count; i += kChunkThreads) {
      CountDigit(keys[i], 1, progress.key, digit, shared.bins);
    }
  }
  end_lane();
}

__device__ SlotClasses ClassifyByKey(const uint32_t* chunk_keys, uint32_t slot_count,
                                     LaneThreshold threshold) {
  const auto* const keys =
      reinterpret_cast<const uint4*>(chunk_keys) + threadIdx.x * (kSlotsPerThread / 4);
  SlotClasses classes = {0, 0};
  PQC_UNROLL
  for (uint32_t i = 0; i < kSlotsPerThread; i += 4) {
    if (i >= slot_count) break;
    const uint4 four = keys[i / 4];
    const uint32_t parts[4] = {four.x, four.y, four.z, four.w};
    PQC_UNROLL
    for (uint32_t j = 0; j < 4; ++j) {
      const bool exists = i + j < slot_count;
      classes.above |= (exists && parts[j] > threshold.key ? 1u : 0u) << (i + j);
      classes.equal |= (exists && parts[j] == threshold.key ? 1u : 0u) << (i + j);
    }
  }
  return classes;
}

__global__ void ClassifyValuesKernel(ValueSelectArgs args, ValueScratch scratch) {
  const ChunkRun run = RunOfBlock(args.candidates.chunk_capacity);
  LaneThreshold threshold = {kNoKey, 0};
  uint32_t lane = kNoLane;
  for (uint32_t i = run.begin; i < run.end; ++i) {
    const SelectChunk chunk = args.candidates.chunks[i];
    if (chunk.lane == kNoLane) continue;
    if (chunk.lane != lane) {
      lane = chunk.lane;
      __syncthreads();  // what the lane before kept in shared memory has been read
      threshold = LaneDigits(args.candidates, scratch.digits, lane)
                      .Find(kDigitCount - 1, Shared<DigitShared>(), IsFirstOfLane(args, lane, i),
                            args.selection.counts);
    }
    KeepClasses(ClassifyByKey(scratch.keys + size_t{i} * kChunkTokens, SlotsOfThread(chunk).count,
                              threshold),
                i, scratch.classes, Shared<DigitShared>().words);
  }
}

__global__ void EmitValuesKernel(ValueSelectArgs args, ValueScratch scratch) {
  const SelectChunk chunk = args.candidates.chunks[blockIdx.x];
  if (chunk.lane == kNoLane) return;
  const LaneThreshold threshold =
      LaneDigits(args.candidates, scratch.digits, chunk.lane).Progress(kDigitCount - 1);
  EmitSelectedSlots(chunk, args.candidates.lanes[chunk.lane], threshold, scratch.classes,
                    args.selection, Shared<DigitShared>().words);
}

template <typename Logits>
KernelStatus LaunchAll(const ValueSelectArgs& args, Stream stream) {
  const ScoreSelectShape shape = {args.group_size, args.candidates.lane_capacity,
                                  args.candidates.chunk_capacity};
  const ValueScratch scratch = CutScratch(shape, args.scratch);
  const dim3 runs(ChunkBlocks(args.candidates.chunk_capacity));
  const LaunchShape logit_launch = {runs, kChunkThreads, sizeof(LogitShared)};
  const LaunchShape digit_launch = {runs, kChunkThreads, sizeof(DigitShared)};
  const LaunchShape emit_launch = {dim3(args.candidates.chunk_capacity), kChunkThreads,
                                   sizeof(DigitShared)};
  // Clears the counts, because a lane without chunks has no block that would write its count.
  KernelStatus status =
      Clear(args.selection.counts, size_t{shape.lane_capacity} * sizeof(uint32_t), stream);
  if (status.ok()) {
    status = Clear(scratch.digits.bins, DigitBinsBytes(shape.lane_capacity), stream);
  }
  if (status.ok() && (args.lse != nullptr || ReadsNormalisers(args.rule, args.group_size))) {
    status = Launch(NormaliseChunksKernel<Logits>, logit_launch, stream, args, scratch);
  }
  if (status.ok()) {
    status = Launch(FindKeysKernel<Logits>, logit_launch, stream, args, scratch);
  }
  for (uint32_t digit = 1; status.ok() && digit < kDigitCount; ++digit) {
    status = Launch(CountDigitsKernel, digit_launch, stream, args, scratch, digit);
  }
  if (status.ok()) status = Launch(ClassifyValuesKernel, digit_launch, stream, args, scratch);
  if (status.ok()) status = Launch(EmitValuesKernel, emit_launch, stream, args, scratch);
  return status;
}

}  // namespace

KernelStatus SelectByValues(const ValueSelectArgs& args, Stream stream) {
  if (args.tables == nullptr) return LaunchAll<GivenLogits<kHeadsAtOnce>>(args, stream);
  const uint32_t head_count = args.rule == GroupRule::kMeanLogit ? 1 : args.group_size;
  return LoadsHeadsAtOnce(args.geometry, head_count)
             ? LaunchAll<CodeLogits<kHeadsAtOnce>>(args, stream)
             : LaunchAll<CodeLogits<1>>(args, stream);
}

size_t ScoreSelectScratchBytes(const ScoreSelectShape& shape) {
  return DigitScratchBytes(shape.lane_capacity) +
         ScratchPart(size_t{shape.chunk_capacity} * shape.group_size * sizeof(PartialNormaliser)) +
         ScratchPart(size_t{shape.chunk_capacity} * kChunkTokens * sizeof(uint32_t)) +
         ClassScratchBytes(shape.chunk_capacity);
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

// Logits of the tokens of a chunk, summed from tables, and the normalisers of their softmax.
//
// Included by the kernels that compare tokens by their values. A thread computes the logits of its
// 16 slots for up to kHeads heads at once: in shared memory the entries of these heads are
// neighbours, so that one load serves all of them.
#ifndef PQCACHED_KERNELS_CUDA_SELECT_TABLE_LOGITS_CUH_
#define PQCACHED_KERNELS_CUDA_SELECT_TABLE_LOGITS_CUH_

#include "kernels/cuda/select/select_common.cuh"

namespace pqcached::kernels::cuda {

inline constexpr uint32_t kSharedTableFloats = 8192;
inline constexpr uint32_t kHeadsAtOnce = 4;

// Returns whether the tables of kHeadsAtOnce heads fit into shared memory, and there are several
// heads to load. Those of one head always fit.
constexpr bool LoadsHeadsAtOnce(const PqGeometry& geometry, uint32_t head_count) {
  return head_count > 1 && TableFloats(geometry) * kHeadsAtOnce <= kSharedTableFloats;
}

// Logits of this thread's slots, chunk by chunk. All threads of the block call each function
// together.
template <uint32_t kHeads>
class TableLogits {
 public:
  static constexpr uint32_t kLoadedHeads = kHeads;

  // tables: [table, group_size, TableFloats]. `shared`: [kSharedTableFloats] of the block.
  __device__ TableLogits(PqGeometry geometry, const float* tables, uint32_t group_size,
                         GroupRule rule, float* shared)
      : geometry_(geometry),
        tables_(tables),
        group_size_(group_size),
        rule_(rule),
        shared_(reinterpret_cast<HeadFloats<kHeads>*>(shared)) {}

  __device__ void Begin(const SelectChunk& chunk) {
    chunk_ = chunk;
    slots_ = SlotsOfThread(chunk);
  }

  // Heads after aggregation: 1 under kMeanLogit.
  __device__ uint32_t head_count() const {
    return rule_ == GroupRule::kMeanLogit ? 1 : group_size_;
  }
  __device__ uint32_t slot_count() const { return slots_.count; }

  // Sets logits[i] to those of slot i for heads first_head, first_head + 1, ...; what lies beyond
  // slot_count() or head_count() is a number without meaning.
  __device__ void Load(uint32_t first_head, HeadFloats<kHeads> (&logits)[kSlotsPerThread]) {
    LoadTable(first_head);
    PQC_UNROLL
    for (uint32_t i = 0; i < kSlotsPerThread; ++i) logits[i] = {};
    const uint32_t planes = PlaneCount(geometry_);
    for (uint32_t plane = 0; plane < planes; ++plane) {
      uint8_t codes[kSlotsPerThread];
      LoadPlane(chunk_.planes + plane * chunk_.stride, slots_, codes);
      if (!HasNibblePlanes(geometry_)) {
        AddEntries(plane << geometry_.bits, codes, 0, (1u << geometry_.bits) - 1, logits);
      } else {
        AddEntries(2 * plane << 4, codes, 0, 15u, logits);
        AddEntries((2 * plane + 1) << 4, codes, 4, 15u, logits);
      }
    }
  }

 private:
  static constexpr uint32_t kNothing = 0xFFFFFFFFu;

  __device__ void LoadTable(uint32_t first_head) {
    if (loaded_table_ == chunk_.table && loaded_head_ == first_head) return;
    loaded_table_ = chunk_.table;
    loaded_head_ = first_head;
    const TableView view = TablesOf(tables_, chunk_.table, geometry_, group_size_, rule_);
    __syncthreads();  // the entries before have been read
    for (uint32_t i = threadIdx.x; i < view.entry_count * kHeads; i += kChunkThreads) {
      const uint32_t head = i / view.entry_count;
      const uint32_t entry = i % view.entry_count;
      shared_[entry].of[head] =
          first_head + head < view.head_count ? view.Entry(first_head + head, entry) : 0.0f;
    }
    __syncthreads();
  }

  // Adds the entries of one sub-space, which begin at `begin`.
  __device__ void AddEntries(uint32_t begin, const uint8_t (&codes)[kSlotsPerThread],
                             uint32_t shift, uint32_t mask,
                             HeadFloats<kHeads> (&logits)[kSlotsPerThread]) const {
    PQC_UNROLL
    for (uint32_t i = 0; i < kSlotsPerThread; ++i) {
      const uint32_t index = begin + (codes[i] >> shift & mask);
      const HeadFloats<kHeads> entry = shared_[index];
      PQC_UNROLL
      for (uint32_t head = 0; head < kHeads; ++head) logits[i].of[head] += entry.of[head];
    }
  }

  PqGeometry geometry_;
  const float* tables_;
  uint32_t group_size_;
  GroupRule rule_;
  HeadFloats<kHeads>* shared_;
  uint32_t loaded_table_ = kNothing;
  uint32_t loaded_head_ = kNothing;
  SelectChunk chunk_;
  ThreadSlots slots_ = {0, 0};
};

// Adds the logits of heads first_head, first_head + 1, ... to the values of this thread's slots;
// head 0 begins them. normalisers: [head_count].
template <uint32_t kHeads>
__device__ inline void AddHeads(GroupRule rule, uint32_t head_count, uint32_t first_head,
                                const HeadFloats<kHeads> (&logits)[kSlotsPerThread],
                                const HeadNormaliser* normalisers,
                                float (&values)[kSlotsPerThread]) {
  PQC_UNROLL
  for (uint32_t head = 0; head < kHeads; ++head) {
    if (first_head + head >= head_count) break;
    const HeadNormaliser normaliser = normalisers[first_head + head];
    PQC_UNROLL
    for (uint32_t i = 0; i < kSlotsPerThread; ++i) {
      values[i] = AddToValue(rule, head_count, first_head + head, values[i], logits[i].of[head],
                             normaliser);
    }
  }
}

// Maximum and sum of one head over one chunk.
struct PartialNormaliser {
  float max;
  float sum;  // sum of exp(logit - max)
};

// Shared memory of NormaliseChunk.
struct NormaliseShared {
  float maxima[kHeadsAtOnce][kChunkWarps];
  float sums[kHeadsAtOnce][kChunkWarps];
};

// Computes the maximum and the sum of exponentials of every head over one chunk, with all threads
// of the block. partials: [head_count].
template <typename Logits>
__device__ void NormaliseChunk(Logits& logits, NormaliseShared& shared,
                               PartialNormaliser* partials) {
  constexpr uint32_t kHeads = Logits::kLoadedHeads;
  const uint32_t head_count = logits.head_count();
  const uint32_t slot_count = logits.slot_count();
  for (uint32_t first = 0; first < head_count; first += kHeads) {
    HeadFloats<kHeads> of_slots[kSlotsPerThread];
    logits.Load(first, of_slots);
    float max[kHeads];
    PQC_UNROLL
    for (uint32_t head = 0; head < kHeads; ++head) {
      max[head] = -kLogitLimit;
      PQC_UNROLL
      for (uint32_t i = 0; i < kSlotsPerThread; ++i) {
        if (i < slot_count) max[head] = Larger(max[head], of_slots[i].of[head]);
      }
      max[head] = WarpMax(max[head]);
      if (LaneIndex() == 0) shared.maxima[head][WarpIndex()] = max[head];
    }
    __syncthreads();
    PQC_UNROLL
    for (uint32_t head = 0; head < kHeads; ++head) {
      for (uint32_t warp = 0; warp < kChunkWarps; ++warp) {
        max[head] = Larger(max[head], shared.maxima[head][warp]);
      }
      float sum = 0.0f;
      PQC_UNROLL
      for (uint32_t i = 0; i < kSlotsPerThread; ++i) {
        const float exponent = of_slots[i].of[head] - max[head];
        if (i < slot_count && exponent >= kMinExponent) sum += expf(exponent);
      }
      sum = WarpSum(sum);
      if (LaneIndex() == 0) shared.sums[head][WarpIndex()] = sum;
    }
    __syncthreads();
    PQC_UNROLL
    for (uint32_t head = 0; head < kHeads; ++head) {
      if (threadIdx.x != head || first + head >= head_count) continue;
      float sum = 0.0f;
      for (uint32_t warp = 0; warp < kChunkWarps; ++warp) sum += shared.sums[head][warp];
      partials[first + head] = {max[head], sum};
    }
  }
}

// Merges the normalisers of one head over parts [begin, end), with one warp. partials: [part,
// group_size]. A sum of 0 is one of nothing.
__device__ inline HeadNormaliser MergeNormalisers(const PartialNormaliser* partials, uint32_t begin,
                                                  uint32_t end, uint32_t group_size,
                                                  uint32_t head) {
  float max = -kLogitLimit;
  for (uint32_t i = begin + LaneIndex(); i < end; i += kWarpThreads) {
    max = Larger(max, partials[size_t{i} * group_size + head].max);
  }
  max = WarpMax(max);
  double sum = 0.0;
  for (uint32_t i = begin + LaneIndex(); i < end; i += kWarpThreads) {
    const PartialNormaliser partial = partials[size_t{i} * group_size + head];
    const float exponent = partial.max - max;
    if (exponent >= kMinExponent) sum += double{expf(exponent)} * double{partial.sum};
  }
  sum = WarpSum(sum);
  return {max, static_cast<float>(1.0 / sum), static_cast<float>(log(sum))};
}

}  // namespace pqcached::kernels::cuda

#endif  // PQCACHED_KERNELS_CUDA_SELECT_TABLE_LOGITS_CUH_

// Search for the k-th largest key of a lane, digit by digit from the highest, by kernels over all
// its entries: one counts the entries of each value of a digit, the next one finds the digit from
// these counts and counts the digit below it among the entries that share the digits found so far.
//
// Included by the kernels of selections.
#ifndef PQCACHED_KERNELS_CUDA_SELECT_DIGITS_CUH_
#define PQCACHED_KERNELS_CUDA_SELECT_DIGITS_CUH_

#include "kernels/cuda/select/select_common.cuh"

namespace pqcached::kernels::cuda {

// Digits of a key, from the highest: 11, 11 and 10 bits.
inline constexpr uint32_t kDigitCount = 3;
inline constexpr uint32_t kMaxBins = 2048;

__host__ __device__ constexpr uint32_t DigitShift(uint32_t digit) {
  return digit == 0 ? 21 : digit == 1 ? 10 : 0;
}
__host__ __device__ constexpr uint32_t DigitBins(uint32_t digit) {
  return digit == 2 ? 1024 : 2048;
}

struct DigitScratch {
  uint32_t* bins;           // [digit, lane, kMaxBins]: tokens by digit, of keys with the same
                            // higher digits
  LaneThreshold* progress;  // [digit, lane]: key prefix found so far, and tokens left to select
};

constexpr size_t DigitBinsBytes(size_t lane_capacity) {
  return ScratchPart(kDigitCount * lane_capacity * kMaxBins * sizeof(uint32_t));
}
constexpr size_t DigitScratchBytes(size_t lane_capacity) {
  return DigitBinsBytes(lane_capacity) +
         ScratchPart(kDigitCount * lane_capacity * sizeof(LaneThreshold));
}
inline DigitScratch CutDigitScratch(ScratchParts& parts, size_t lane_capacity) {
  DigitScratch cut;
  cut.bins = parts.Take<uint32_t>(kDigitCount * lane_capacity * kMaxBins);
  cut.progress = parts.Take<LaneThreshold>(kDigitCount * lane_capacity);
  return cut;
}

struct DigitShared {
  uint32_t words[kChunkWarps];
  uint32_t bins[kMaxBins];
  uint32_t digit;
  uint32_t above;
  uint32_t total;
};

// The digits of one lane, for a block of kChunkThreads.
class LaneDigits {
 public:
  __device__ LaneDigits(const SelectTables& candidates, const DigitScratch& scratch, uint32_t lane)
      : k_(candidates.lanes[lane].k),
        lane_(lane),
        lane_capacity_(candidates.lane_capacity),
        scratch_(scratch) {}

  // Adds the counts of the block, DigitBins(digit) of them in shared memory, to those of the lane.
  __device__ void AddBins(const uint32_t* block_bins, uint32_t digit) const {
    __syncthreads();
    uint32_t* const bins = Bins(digit);
    for (uint32_t i = threadIdx.x; i < DigitBins(digit); i += kChunkThreads) {
      if (block_bins[i] > 0) atomicAdd(&bins[i], block_bins[i]);
    }
  }

  // Finds one digit of the lane's k-th largest key from the counts of the previous kernel. All
  // blocks of a lane find the same digit; one of them, which `stores`, keeps it for later kernels,
  // and after the first digit the number of tokens that are selected.
  __device__ LaneThreshold Find(uint32_t digit, DigitShared& shared, bool stores,
                                uint32_t* selected_counts) const {
    const uint32_t* bins = Bins(digit);
    const uint32_t bins_per_thread = DigitBins(digit) / kChunkThreads;
    // thread 0 takes the largest digits
    const uint32_t last = DigitBins(digit) - 1 - threadIdx.x * bins_per_thread;
    uint32_t tokens = 0;
    for (uint32_t i = 0; i < bins_per_thread; ++i) tokens += bins[last - i];
    uint32_t above = BlockSumBefore(tokens, shared.words);
    if (threadIdx.x == kChunkThreads - 1) shared.total = above + tokens;
    __syncthreads();
    LaneThreshold progress = {0, Smaller(k_, shared.total)};
    if (digit > 0) progress = Progress(digit - 1);
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
    if (stores && threadIdx.x == 0) {
      scratch_.progress[digit * lane_capacity_ + lane_] = progress;
      if (digit == 0) selected_counts[lane_] = Smaller(k_, shared.total);
    }
    return progress;
  }

  // Returns what Find stored for a digit.
  __device__ LaneThreshold Progress(uint32_t digit) const {
    return scratch_.progress[digit * lane_capacity_ + lane_];
  }

 private:
  __device__ uint32_t* Bins(uint32_t digit) const {
    return scratch_.bins + (size_t{digit} * lane_capacity_ + lane_) * kMaxBins;
  }

  uint32_t k_;
  uint32_t lane_;
  uint32_t lane_capacity_;
  const DigitScratch& scratch_;
};

// Counts an entry of `weight` tokens by `digit`, if its key shares the higher digits of `prefix`.
__device__ inline void CountDigit(uint32_t key, uint32_t weight, uint32_t prefix, uint32_t digit,
                                  uint32_t* bins) {
  const uint32_t shift_before = DigitShift(digit - 1);
  if (weight == 0 || key >> shift_before != prefix >> shift_before) return;
  atomicAdd(&bins[key >> DigitShift(digit) & (DigitBins(digit) - 1)], weight);
}

}  // namespace pqcached::kernels::cuda

#endif  // PQCACHED_KERNELS_CUDA_SELECT_DIGITS_CUH_

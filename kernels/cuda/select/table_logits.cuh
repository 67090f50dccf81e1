// Logits of the tokens of a chunk, summed from tables, and the normalisers of their softmax.
//
// Included by the kernels that compare tokens by their values.
#ifndef PQCACHED_KERNELS_CUDA_SELECT_TABLE_LOGITS_CUH_
#define PQCACHED_KERNELS_CUDA_SELECT_TABLE_LOGITS_CUH_

#include "kernels/cuda/select/select_common.cuh"

namespace pqcached::kernels::cuda {

inline constexpr uint32_t kSharedTableFloats = 8192;  // larger tables are read from global memory

// Logits of this thread's slots. All threads of the block must construct it together.
class TableLogits {
 public:
  // `shared`: [kSharedTableFloats] of the block.
  __device__ TableLogits(PqGeometry geometry, TableView tables, const SelectChunk& chunk,
                         float* shared)
      : geometry_(geometry), tables_(tables) {
    const uint32_t float_count = tables_.head_count * tables_.entry_count;
    if (float_count <= kSharedTableFloats) {
      for (uint32_t i = threadIdx.x; i < float_count; i += kChunkThreads) {
        shared[i] = tables_.Entry(i / tables_.entry_count, i % tables_.entry_count);
      }
      __syncthreads();
      tables_ = {shared, tables_.entry_count, tables_.head_count, 1};
    }
    const ThreadSlots slots = SlotsOfThread(chunk);
    const uint32_t planes = PlaneCount(geometry_);
    for (uint32_t plane = 0; plane < planes; ++plane) {
      uint8_t bytes[kSlotsPerThread];
      LoadPlane(chunk.planes + plane * chunk.stride, slots, bytes);
      PQC_UNROLL
      for (uint32_t i = 0; i < kSlotsPerThread; ++i) codes_[plane][i] = bytes[i];
    }
  }

  __device__ uint32_t head_count() const { return tables_.head_count; }
  __device__ float Logit(uint32_t head, uint32_t i) const {
    float sum = 0.0f;
    for (uint32_t subspace = 0; subspace < geometry_.subspace_count; ++subspace) {
      const float entry = tables_.Entry(head, (subspace << geometry_.bits) + Code(subspace, i));
      sum = subspace == 0 ? entry : sum + entry;
    }
    return sum;
  }

 private:
  static constexpr uint32_t kMaxPlanes = 16;

  __device__ uint32_t Code(uint32_t subspace, uint32_t i) const {
    if (!HasNibblePlanes(geometry_)) return codes_[subspace][i];
    const uint32_t pair = codes_[subspace / 2][i];
    return subspace % 2 == 0 ? pair & 15u : pair >> 4;
  }

  PqGeometry geometry_;
  TableView tables_;
  uint8_t codes_[kMaxPlanes][kSlotsPerThread];
};

// Maximum and sum of one head over one chunk.
struct PartialNormaliser {
  float max;
  float sum;  // sum of exp(logit - max)
};

// Computes the maximum and the sum of exponentials of every head over one chunk, with all threads
// of the block. `count`: slots of this thread. `slots` has one entry per warp.
template <typename Logits>
__device__ void NormaliseChunk(const Logits& logits, uint32_t count, float* slots,
                               PartialNormaliser* partials) {
  for (uint32_t head = 0; head < logits.head_count(); ++head) {
    float max = -kLogitLimit;
    for (uint32_t i = 0; i < count; ++i) max = Larger(max, logits.Logit(head, i));
    max = BlockMax(max, slots);
    float sum = 0.0f;
    for (uint32_t i = 0; i < count; ++i) {
      const float exponent = logits.Logit(head, i) - max;
      if (exponent >= kMinExponent) sum += expf(exponent);
    }
    sum = BlockSum(sum, slots);
    if (threadIdx.x == 0) partials[head] = {max, sum};
  }
}

// Merges the normalisers of one head over all chunks of a lane, with one warp. partials: [chunk,
// group_size].
__device__ inline HeadNormaliser MergeNormalisers(const PartialNormaliser* partials,
                                                  const SelectLane& lane, uint32_t group_size,
                                                  uint32_t head) {
  float max = -kLogitLimit;
  for (uint32_t i = lane.chunk_begin + LaneIndex(); i < lane.chunk_end; i += kWarpThreads) {
    max = Larger(max, partials[size_t{i} * group_size + head].max);
  }
  max = WarpMax(max);
  double sum = 0.0;
  for (uint32_t i = lane.chunk_begin + LaneIndex(); i < lane.chunk_end; i += kWarpThreads) {
    const PartialNormaliser partial = partials[size_t{i} * group_size + head];
    const float exponent = partial.max - max;
    if (exponent >= kMinExponent) sum += double{expf(exponent)} * double{partial.sum};
  }
  sum = WarpSum(sum);
  return {max, static_cast<float>(1.0 / sum), static_cast<float>(log(sum))};
}

}  // namespace pqcached::kernels::cuda

#endif  // PQCACHED_KERNELS_CUDA_SELECT_TABLE_LOGITS_CUH_

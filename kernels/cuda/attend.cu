// Partial attention.
//
// A thread block computes one part (split) of the rows of one lane for up to kHeads of the lane's L
// * G heads. Rows are loaded into shared memory in tiles, 16 bytes per thread; the loads of the
// next tile are under way during the work on the current one. There a thread scores one row for
// some heads, and later accumulates one value dimension for all heads; only the softmax needs
// reductions over the threads of a warp. Rows in the tile are padded by 16 bytes, so that 32 rows
// are read without bank conflicts.
//
// Speed: rows in host memory are read once, because all heads of a lane (up to kHeads) share a
// block. Products do not use tensor cores.
#include "kernels/cuda/attend.h"

#include "kernels/cuda/elements.cuh"
#include "kernels/cuda/launch.cuh"

namespace pqcached::kernels::cuda {
namespace {

constexpr uint32_t kThreads = 128;
constexpr uint32_t kWarps = kThreads / kWarpThreads;
constexpr uint32_t kMaxDim = 256;
constexpr uint32_t kDimsPerThread = kMaxDim / kThreads;
constexpr uint32_t kMaxHeads = 64;  // L * G
constexpr uint32_t kMaxQueryLength = 8;
constexpr uint32_t kTileRows = 32;
constexpr uint32_t kLoads = 8;  // of 16 bytes, of a thread for a tile
constexpr uint32_t kMaxTileWords = kLoads * kThreads;
constexpr uint32_t kSharedBudget = 48 << 10;
constexpr uint32_t kMaxSplits = 1024;
constexpr uint32_t kMaxLanes = 65535;
constexpr float kLargestFloat = 3.402823466e38f;

// Kernel parameters that are computed from AttendArgs.
struct AttendPlan {
  uint32_t head_count;      // L * G
  uint32_t tile_rows;       // rows in shared memory, at most kTileRows
  uint32_t tile_row_words;  // in units of 16 bytes, including the padding
  uint32_t query_begin;     // offset in shared memory in bytes
  float* outputs;           // [split, lane, head, value_dim]
  float* lses;              // [split, lane, head]
};

using FourFloats = HeadFloats<4>;

// State per head: the weights of the tile's rows, then the factor that rescales the running sums.
template <uint32_t kHeads>
struct AttendShared {
  HeadFloats<kHeads> weights[kTileRows];
  float rescale[kHeads];
  float maxima[kHeads];
  float sums[kHeads];
  // Followed in memory by the tile, then by the queries [kHeads, key_dim].
};

template <uint32_t kHeads>
constexpr uint32_t TileBegin() {
  return (sizeof(AttendShared<kHeads>) + 15) / 16 * 16;
}

// Scales a dot product to a logit and clamps it to floats: above their range to the largest float,
// below it to -infinity.
__device__ float ToLogit(const AttendArgs& args, float dot) {
  float logit = dot * args.scale;
  if (args.softcap > 0.0f) logit = args.softcap * tanhf(logit / args.softcap);
  if (logit > kLargestFloat) return kLargestFloat;
  return logit < -kLargestFloat ? -INFINITY : logit;
}

// kScored: with args.logits.
template <DType kDType, uint32_t kHeads, bool kScored>
class AttendBlock {
 public:
  __device__ AttendBlock(const AttendArgs& args, const AttendPlan& plan)
      : args_(args),
        plan_(plan),
        shared_(Shared<AttendShared<kHeads>>()),
        tile_(
            reinterpret_cast<uint4*>(reinterpret_cast<std::byte*>(&shared_) + TileBegin<kHeads>())),
        queries_(
            reinterpret_cast<float*>(reinterpret_cast<std::byte*>(&shared_) + plan.query_begin)),
        lane_(blockIdx.y),
        first_head_(blockIdx.z * kHeads),
        head_count_(Smaller(kHeads, plan.head_count - first_head_)) {
    const uint32_t words = plan.tile_row_words - 1;
    PQC_UNROLL
    for (uint32_t i = 0; i < kLoads; ++i) {
      const uint32_t index = threadIdx.x + i * kThreads;
      places_[i] = {static_cast<uint16_t>(index / words), static_cast<uint16_t>(index % words)};
    }
  }

  __device__ void Run() {
    const uint32_t row_count = args_.row_counts[lane_];
    const uint32_t rows_per_split =
        (row_count + args_.shape.split_count - 1) / args_.shape.split_count;
    const uint32_t begin = Smaller(row_count, blockIdx.x * rows_per_split);
    const uint32_t end = Smaller(row_count, begin + rows_per_split);
    Begin();
    LoadWords(begin, Smaller(plan_.tile_rows, end - begin));
    for (uint32_t first = begin; first < end; first += plan_.tile_rows) {
      const uint32_t count = Smaller(plan_.tile_rows, end - first);
      const uint32_t next = first + count;
      __syncthreads();
      StoreWords(count);
      __syncthreads();
      LoadWords(next, Smaller(plan_.tile_rows, end - next));
      ScoreTile(first, count);
      __syncthreads();
      WeighTile(count);
      __syncthreads();
      AddValues(count);
    }
    End();
  }

 private:
  __device__ void Begin() {
    if constexpr (!kScored) {
      const uint32_t key_dim = args_.shape.key_dim;
      const float* from =
          args_.queries + (size_t{lane_} * plan_.head_count + first_head_) * key_dim;
      for (uint32_t i = threadIdx.x; i < head_count_ * key_dim; i += kThreads) {
        queries_[i] = from[i];
      }
    }
    if (threadIdx.x < kHeads) {
      shared_.maxima[threadIdx.x] = -INFINITY;
      shared_.sums[threadIdx.x] = 0.0f;
      shared_.rescale[threadIdx.x] = 1.0f;
    }
    PQC_UNROLL
    for (uint32_t head = 0; head < kHeads; ++head) {
      PQC_UNROLL
      for (uint32_t i = 0; i < kDimsPerThread; ++i) values_[head][i] = 0.0f;
    }
  }

  // Returns whether a word of a row is read: with logits not those of the key.
  __device__ bool Reads(uint32_t word) const {
    return !kScored || word >= args_.shape.key_dim / Vector16<kDType>::kCount;
  }

  // Loads this thread's words of the tile that begins with row `first` of the lane.
  __device__ void LoadWords(uint32_t first, uint32_t count) {
    const std::byte* const* addresses = args_.addresses + lane_ * args_.address_stride + first;
    PQC_UNROLL
    for (uint32_t i = 0; i < kLoads; ++i) {
      if (places_[i].row >= count || !Reads(places_[i].word)) continue;
      words_[i] = reinterpret_cast<const uint4*>(addresses[places_[i].row])[places_[i].word];
    }
  }

  __device__ void StoreWords(uint32_t count) {
    PQC_UNROLL
    for (uint32_t i = 0; i < kLoads; ++i) {
      if (places_[i].row >= count || !Reads(places_[i].word)) continue;
      tile_[places_[i].row * plan_.tile_row_words + places_[i].word] = words_[i];
    }
  }

  // Returns whether a head attends to a row of the lane.
  __device__ bool Attends(uint32_t head, uint32_t row) const {
    if (args_.row_ranges == nullptr) return true;
    const uint32_t token = (first_head_ + head) / args_.shape.group_size;
    const size_t query_token = size_t{lane_} * args_.shape.query_length + token;
    const uint32_t* range = args_.row_ranges + query_token * 2;
    return row >= range[0] && row < range[1];
  }

  // Reads the logit that is given of a row of the lane.
  __device__ float GivenLogit(uint32_t head, uint32_t row) const {
    const GivenLogits& given = args_.logits;
    const uint32_t group = args_.shape.group_size;
    const SeatItem& item = given.seats[lane_ / given.kv_heads];
    const uint32_t token = item.query_begin + (first_head_ + head) / group;
    const uint32_t query_head = lane_ % given.kv_heads * group + (first_head_ + head) % group;
    const int64_t element =
        token * given.token_stride + query_head * given.head_stride + row * given.row_stride;
    const float logit = LoadFloat(
        given.dtype, given.data + element * static_cast<int64_t>(ElementBytes(given.dtype)), 0);
    return logit > kLargestFloat ? kLargestFloat : logit;
  }

  // Scores the tile, which begins with row `first` of the lane: warp w takes heads w, w + kWarps,
  // ...; thread l of a warp takes row l.
  __device__ void ScoreTile(uint32_t first, uint32_t count) {
    const uint32_t row = LaneIndex();
    if (row >= count) return;
    if constexpr (kScored) {
      for (uint32_t head = WarpIndex(); head < head_count_; head += kWarps) {
        shared_.weights[row].of[head] =
            Attends(head, first + row) ? GivenLogit(head, first + row) : -INFINITY;
      }
      return;
    }
    const uint4* key = tile_ + row * plan_.tile_row_words;
    constexpr uint32_t kPerWord = Vector16<kDType>::kCount;
    for (uint32_t head = WarpIndex(); head < head_count_; head += kWarps) {
      const auto* query =
          reinterpret_cast<const FourFloats*>(queries_ + head * args_.shape.key_dim);
      float sum = 0.0f;
      for (uint32_t word = 0; word < args_.shape.key_dim / kPerWord; ++word) {
        const Vector16<kDType> part(key[word]);
        PQC_UNROLL
        for (uint32_t i = 0; i < kPerWord; i += 4) {
          const FourFloats four = query[(word * kPerWord + i) / 4];
          PQC_UNROLL
          for (uint32_t j = 0; j < 4; ++j) sum += four.of[j] * part.values[i + j];
        }
      }
      shared_.weights[row].of[head] = Attends(head, first + row) ? ToLogit(args_, sum) : -INFINITY;
    }
  }

  // Converts logits to weights relative to the largest logit so far, and computes the factors that
  // rescale earlier sums to it.
  __device__ void WeighTile(uint32_t count) {
    for (uint32_t head = WarpIndex(); head < head_count_; head += kWarps) {
      const uint32_t row = LaneIndex();
      const float logit = row < count ? shared_.weights[row].of[head] : -INFINITY;
      const float before = shared_.maxima[head];
      const float largest = Larger(before, WarpMax(logit));
      const float weight = logit == -INFINITY ? 0.0f : expf(logit - largest);
      const float sum = WarpSum(weight);
      if (row < count) shared_.weights[row].of[head] = weight;
      __syncwarp();  // every thread has read the maximum
      if (row == 0) {
        const float rescale = before == -INFINITY ? 0.0f : expf(before - largest);
        shared_.rescale[head] = rescale;
        shared_.sums[head] = shared_.sums[head] * rescale + sum;
        shared_.maxima[head] = largest;
      }
    }
  }

  // Accumulates values: a thread owns value dimensions threadIdx.x, threadIdx.x + kThreads, ... for
  // all heads.
  __device__ void AddValues(uint32_t count) {
    PQC_UNROLL
    for (uint32_t i = 0; i < kDimsPerThread; ++i) {
      const uint32_t dim = threadIdx.x + i * kThreads;
      if (dim >= args_.shape.value_dim) break;
      PQC_UNROLL
      for (uint32_t head = 0; head < kHeads; ++head) values_[head][i] *= shared_.rescale[head];
      for (uint32_t row = 0; row < count; ++row) {
        const float value = LoadFloat(
            kDType, reinterpret_cast<const std::byte*>(tile_ + row * plan_.tile_row_words),
            args_.shape.key_dim + dim);
        const HeadFloats<kHeads> weights = shared_.weights[row];
        PQC_UNROLL
        for (uint32_t head = 0; head < kHeads; ++head) {
          if (head < head_count_) values_[head][i] += weights.of[head] * value;
        }
      }
    }
  }

  __device__ void End() {
    __syncthreads();
    const size_t first =
        (size_t{blockIdx.x} * args_.shape.lane_capacity + lane_) * plan_.head_count + first_head_;
    PQC_UNROLL
    for (uint32_t head = 0; head < kHeads; ++head) {
      if (head >= head_count_) break;
      const float sum = shared_.sums[head];
      PQC_UNROLL
      for (uint32_t i = 0; i < kDimsPerThread; ++i) {
        const uint32_t dim = threadIdx.x + i * kThreads;
        if (dim >= args_.shape.value_dim) break;
        plan_.outputs[(first + head) * args_.shape.value_dim + dim] =
            sum > 0.0f ? values_[head][i] / sum : 0.0f;
      }
    }
    if (threadIdx.x < head_count_) {
      const float sum = shared_.sums[threadIdx.x];
      plan_.lses[first + threadIdx.x] =
          sum > 0.0f ? shared_.maxima[threadIdx.x] + logf(sum) : -INFINITY;
    }
  }

  const AttendArgs& args_;
  const AttendPlan& plan_;
  AttendShared<kHeads>& shared_;
  uint4* tile_;
  float* queries_;
  uint32_t lane_;
  uint32_t first_head_;
  uint32_t head_count_;
  float values_[kHeads][kDimsPerThread];
  struct {
    uint16_t row;
    uint16_t word;
  } places_[kLoads];     // of this thread's words in a tile
  uint4 words_[kLoads];  // of the next tile
};

template <DType kDType, uint32_t kHeads, bool kScored>
__global__ void __launch_bounds__(kThreads) AttendKernel(AttendArgs args, AttendPlan plan) {
  AttendBlock<kDType, kHeads, kScored> block(args, plan);
  block.Run();
}

// Partial j of query q starts at outputs + j * stride, or is taken from a list (ListedPartials).
struct StridedPartials {
  const float* outputs;
  const float* lses;
  uint32_t count;
  size_t query_count;

  __device__ float Lse(uint32_t j, uint32_t query) const { return lses[j * query_count + query]; }
  __device__ float Output(uint32_t j, size_t element, size_t value_dim) const {
    return outputs[j * query_count * value_dim + element];
  }
};
struct ListedPartials {
  MergePartialsArgs args;
  uint32_t count;

  __device__ float Lse(uint32_t j, uint32_t query) const { return args.lses[j][query]; }
  __device__ float Output(uint32_t j, size_t element, size_t) const {
    return args.outputs[j][element];
  }
};

// Merges with one block per query. Every thread reads all of its inputs, including the lse of all
// partials, before any thread writes, so merging in place is safe.
template <typename Partials>
__global__ void MergeKernel(Partials partials, uint32_t value_dim, float* output, float* lse) {
  const uint32_t query = blockIdx.x;
  float largest = -INFINITY;
  for (uint32_t j = 0; j < partials.count; ++j) largest = Larger(largest, partials.Lse(j, query));
  float weight_sum = 0.0f;
  for (uint32_t j = 0; j < partials.count; ++j) {
    if (partials.Lse(j, query) > -INFINITY) weight_sum += expf(partials.Lse(j, query) - largest);
  }
  for (uint32_t dim = threadIdx.x; dim < value_dim; dim += kThreads) {
    const size_t element = size_t{query} * value_dim + dim;
    float sum = 0.0f;
    for (uint32_t j = 0; j < partials.count; ++j) {
      if (partials.Lse(j, query) == -INFINITY) continue;
      sum += expf(partials.Lse(j, query) - largest) * partials.Output(j, element, value_dim);
    }
    output[element] = weight_sum > 0.0f ? sum / weight_sum : 0.0f;
  }
  __syncthreads();
  if (threadIdx.x == 0) lse[query] = weight_sum > 0.0f ? largest + logf(weight_sum) : -INFINITY;
}

bool IsValidShape(const AttendShape& shape) {
  const auto is_dim = [](uint32_t dim) { return dim >= 32 && dim <= kMaxDim && dim % 8 == 0; };
  return is_dim(shape.key_dim) && is_dim(shape.value_dim) && shape.group_size >= 1 &&
         shape.query_length >= 1 && shape.query_length <= kMaxQueryLength &&
         shape.group_size <= kMaxHeads && shape.query_length * shape.group_size <= kMaxHeads &&
         shape.lane_capacity <= kMaxLanes && shape.split_count >= 1 &&
         shape.split_count <= kMaxSplits;
}

template <DType kDType, uint32_t kHeads, bool kScored>
KernelStatus LaunchAttend(const AttendArgs& args, AttendPlan plan, Stream stream) {
  const AttendShape& shape = args.shape;
  const uint32_t words = (shape.key_dim + shape.value_dim) * ElementBytes(kDType) / 16;
  plan.tile_row_words = words + 1;
  const uint32_t query_bytes =
      Smaller(kHeads, plan.head_count) * shape.key_dim * static_cast<uint32_t>(sizeof(float));
  const uint32_t tile_budget = kSharedBudget - TileBegin<kHeads>() - query_bytes;
  plan.tile_rows =
      Smaller(Smaller(kTileRows, kMaxTileWords / words), tile_budget / (plan.tile_row_words * 16));
  plan.query_begin = TileBegin<kHeads>() + plan.tile_rows * plan.tile_row_words * 16;
  const dim3 blocks(shape.split_count, shape.lane_capacity,
                    (plan.head_count + kHeads - 1) / kHeads);
  return Launch(AttendKernel<kDType, kHeads, kScored>,
                {blocks, kThreads, plan.query_begin + query_bytes}, stream, args, plan);
}

template <DType kDType, bool kScored>
KernelStatus LaunchForHeads(const AttendArgs& args, const AttendPlan& plan, Stream stream) {
  if (plan.head_count <= 4) return LaunchAttend<kDType, 4, kScored>(args, plan, stream);
  if (plan.head_count <= 8) return LaunchAttend<kDType, 8, kScored>(args, plan, stream);
  return LaunchAttend<kDType, 16, kScored>(args, plan, stream);
}

template <DType kDType>
KernelStatus LaunchForLogits(const AttendArgs& args, const AttendPlan& plan, Stream stream) {
  if (args.logits.data != nullptr) return LaunchForHeads<kDType, true>(args, plan, stream);
  return LaunchForHeads<kDType, false>(args, plan, stream);
}

}  // namespace

size_t AttendScratchBytes(const AttendShape& shape) {
  if (shape.split_count <= 1) return 0;
  const size_t queries =
      size_t{shape.split_count} * shape.lane_capacity * shape.query_length * shape.group_size;
  return queries * (size_t{shape.value_dim} + 1) * sizeof(float);
}

uint32_t ChooseSplitCount(uint32_t multiprocessor_count, uint32_t lane_count, uint32_t row_count) {
  constexpr uint32_t kBlocksPerMultiprocessor = 4;
  constexpr uint32_t kMinRowsPerSplit = 2 * kTileRows;
  if (lane_count == 0) return 1;
  const uint32_t wanted =
      (multiprocessor_count * kBlocksPerMultiprocessor + lane_count - 1) / lane_count;
  const uint32_t useful = (row_count + kMinRowsPerSplit - 1) / kMinRowsPerSplit;
  return Larger(1u, Smaller(Smaller(wanted, useful), kMaxSplits));
}

KernelStatus AttendRows(const AttendArgs& args, Stream stream) {
  const AttendShape& shape = args.shape;
  if (!IsValidShape(shape) || args.scratch_bytes < AttendScratchBytes(shape)) {
    return {cudaErrorInvalidValue};
  }
  AttendPlan plan = {};
  plan.head_count = shape.query_length * shape.group_size;
  const uint32_t query_count = shape.lane_capacity * plan.head_count;
  plan.outputs = args.output;
  plan.lses = args.lse;
  if (shape.split_count > 1) {
    plan.outputs = static_cast<float*>(args.scratch);
    plan.lses = plan.outputs + size_t{shape.split_count} * query_count * shape.value_dim;
  }
  KernelStatus status;
  switch (shape.dtype) {
    case DType::kF16:
      status = LaunchForLogits<DType::kF16>(args, plan, stream);
      break;
    case DType::kBf16:
      status = LaunchForLogits<DType::kBf16>(args, plan, stream);
      break;
    case DType::kF32:
      status = LaunchForLogits<DType::kF32>(args, plan, stream);
      break;
  }
  if (!status.ok() || shape.split_count == 1) return status;
  const StridedPartials partials = {plan.outputs, plan.lses, shape.split_count, query_count};
  return Launch(MergeKernel<StridedPartials>, {dim3(query_count), kThreads, 0}, stream, partials,
                shape.value_dim, args.output, args.lse);
}

KernelStatus MergePartials(const MergePartialsArgs& args, Stream stream) {
  if (args.partial_count > kMaxPartials) return {cudaErrorInvalidValue};
  return Launch(MergeKernel<ListedPartials>, {dim3(args.query_count), kThreads, 0}, stream,
                ListedPartials{args, args.partial_count}, args.value_dim, args.output, args.lse);
}

}  // namespace pqcached::kernels::cuda

// Merging of partial attentions: a warp merges one row (token and head) at a time.
//
// Each thread merges four adjacent elements at once where the dims of both outputs are contiguous
// and both rows are aligned to them: a row of 128 dims is one load per thread and tensor.
#include "kernels/cuda/merge.h"

#include "kernels/cuda/elements.cuh"

namespace pqcached::kernels::cuda {
namespace {

constexpr uint32_t kThreads = 256;
constexpr uint32_t kWarps = kThreads / kWarpThreads;
constexpr uint32_t kMaxBlocks = 4096;  // warps then take several rows each
constexpr uint32_t kVector = 4;        // elements
constexpr float kLn2 = 0.693147181f;
constexpr float kLog2E = 1.44269504f;

// Result of a row's softmax over its parts. A part that does not count is not read.
struct RowWeights {
  float lse = -INFINITY;
  float of_a = 0.0f;
  float of_b = 0.0f;
  bool reads_a = false;
  bool reads_b = false;
};

__device__ int64_t LseIndex(const PartialTensors& partial, uint32_t token, uint32_t head) {
  return token * partial.lse_strides[0] + head * partial.lse_strides[1];
}

// Returns an element's address; null for tensors without elements. LoadFloat's index is unsigned,
// and offsets may be negative.
template <typename Byte>
__device__ Byte* ElementAt(Byte* data, DType dtype, int64_t index) {
  return data ? data + index * static_cast<int64_t>(ElementBytes(dtype)) : nullptr;
}

__device__ float LoadLse(const PartialTensors& partial, uint32_t token, uint32_t head) {
  const std::byte* at = ElementAt(partial.lse, partial.lse_dtype, LseIndex(partial, token, head));
  const float lse = LoadFloat(partial.lse_dtype, at, 0);
  return partial.lse_is_base2 ? lse * kLn2 : lse;
}

__device__ void StoreLse(const PartialTensors& partial, uint32_t token, uint32_t head, float lse) {
  std::byte* at = ElementAt(partial.lse, partial.lse_dtype, LseIndex(partial, token, head));
  StoreFloat(partial.lse_dtype, at, 0, partial.lse_is_base2 ? lse * kLog2E : lse);
}

__device__ RowWeights Weigh(const MergeTensorsArgs& args, uint32_t token, uint32_t head) {
  const float lse_a = LoadLse(args.a, token, head);
  const float lse_b = LoadLse(args.b, token, head);
  float sink = -INFINITY;
  if (args.sink_logits != nullptr) {
    sink = LoadFloat(args.sink_dtype,
                     ElementAt(args.sink_logits, args.sink_dtype, head * args.sink_stride), 0);
  }
  const float largest = Larger(Larger(Larger(-INFINITY, lse_a), lse_b), sink);
  if (largest == -INFINITY) return {};
  const float exp_a = expf(lse_a - largest);
  const float exp_b = expf(lse_b - largest);
  const float sum = exp_a + exp_b + expf(sink - largest);
  return {.lse = largest + logf(sum),
          .of_a = exp_a / sum,
          .of_b = exp_b / sum,
          .reads_a = lse_a != -INFINITY,
          .reads_b = lse_b != -INFINITY};
}

__device__ float Weighted(const RowWeights& weights, float a, float b) {
  return (weights.reads_a ? weights.of_a * a : 0.0f) + (weights.reads_b ? weights.of_b * b : 0.0f);
}

__device__ std::byte* RowOf(const PartialTensors& partial, uint32_t token, uint32_t head) {
  return ElementAt(partial.output, partial.output_dtype,
                   token * partial.output_strides[0] + head * partial.output_strides[1]);
}

__device__ bool HasVectors(const PartialTensors& partial, const std::byte* row) {
  return partial.output_strides[2] == 1 &&
         reinterpret_cast<uintptr_t>(row) % (kVector * ElementBytes(partial.output_dtype)) == 0;
}

struct FourFloats {
  float values[kVector];
};

__device__ FourFloats LoadFour(DType dtype, const std::byte* row, uint32_t vector) {
  if (dtype == DType::kF32) {
    const uint4 words = reinterpret_cast<const uint4*>(row)[vector];
    return {{__uint_as_float(words.x), __uint_as_float(words.y), __uint_as_float(words.z),
             __uint_as_float(words.w)}};
  }
  const uint2 words = reinterpret_cast<const uint2*>(row)[vector];
  const uint32_t bits[kVector] = {words.x & 0xFFFFu, words.x >> 16, words.y & 0xFFFFu,
                                  words.y >> 16};
  FourFloats four;
  PQC_UNROLL
  for (uint32_t i = 0; i < kVector; ++i) {
    four.values[i] = dtype == DType::kF16 ? HalfToFloat(bits[i]) : Bf16ToFloat(bits[i]);
  }
  return four;
}

__device__ void StoreFour(DType dtype, std::byte* row, uint32_t vector, const FourFloats& four) {
  const float* values = four.values;
  if (dtype == DType::kF32) {
    reinterpret_cast<uint4*>(row)[vector] =
        make_uint4(__float_as_uint(values[0]), __float_as_uint(values[1]),
                   __float_as_uint(values[2]), __float_as_uint(values[3]));
    return;
  }
  uint32_t bits[kVector];
  PQC_UNROLL
  for (uint32_t i = 0; i < kVector; ++i) {
    bits[i] = dtype == DType::kF16 ? FloatToHalf(values[i]) : FloatToBf16(values[i]);
  }
  reinterpret_cast<uint2*>(row)[vector] =
      make_uint2(bits[0] | bits[1] << 16, bits[2] | bits[3] << 16);
}

// Merges the leading elements of a row in vectors, and returns how many.
__device__ uint32_t MergeVectors(const MergeTensorsArgs& args, const RowWeights& weights,
                                 std::byte* row_a, const std::byte* row_b) {
  if (!HasVectors(args.a, row_a) || !HasVectors(args.b, row_b)) return 0;
  const uint32_t vectors = args.dim / kVector;
  for (uint32_t vector = LaneIndex(); vector < vectors; vector += kWarpThreads) {
    FourFloats a = {};
    FourFloats b = {};
    if (weights.reads_a) a = LoadFour(args.a.output_dtype, row_a, vector);
    if (weights.reads_b) b = LoadFour(args.b.output_dtype, row_b, vector);
    PQC_UNROLL
    for (uint32_t i = 0; i < kVector; ++i) {
      a.values[i] = Weighted(weights, a.values[i], b.values[i]);
    }
    StoreFour(args.a.output_dtype, row_a, vector, a);
  }
  return vectors * kVector;
}

__device__ void MergeRow(const MergeTensorsArgs& args, uint32_t token, uint32_t head) {
  const RowWeights weights = Weigh(args, token, head);
  __syncwarp();  // every thread has read a's lse
  if (LaneIndex() == 0) StoreLse(args.a, token, head, weights.lse);
  std::byte* row_a = RowOf(args.a, token, head);
  const std::byte* row_b = RowOf(args.b, token, head);
  const uint32_t first = MergeVectors(args, weights, row_a, row_b);
  for (uint32_t i = first + LaneIndex(); i < args.dim; i += kWarpThreads) {
    std::byte* at = ElementAt(row_a, args.a.output_dtype, i * args.a.output_strides[2]);
    const std::byte* other = ElementAt(row_b, args.b.output_dtype, i * args.b.output_strides[2]);
    const float a = weights.reads_a ? LoadFloat(args.a.output_dtype, at, 0) : 0.0f;
    const float b = weights.reads_b ? LoadFloat(args.b.output_dtype, other, 0) : 0.0f;
    StoreFloat(args.a.output_dtype, at, 0, Weighted(weights, a, b));
  }
}

__global__ void __launch_bounds__(kThreads) MergeTensorsKernel(MergeTensorsArgs args) {
  const uint64_t row_count = uint64_t{args.token_count} * args.head_count;
  const uint64_t warps = uint64_t{gridDim.x} * kWarps;
  for (uint64_t row = uint64_t{blockIdx.x} * kWarps + WarpIndex(); row < row_count; row += warps) {
    MergeRow(args, static_cast<uint32_t>(row / args.head_count),
             static_cast<uint32_t>(row % args.head_count));
  }
}

}  // namespace

KernelStatus MergeTensors(const MergeTensorsArgs& args, Stream stream) {
  const uint64_t row_count = uint64_t{args.token_count} * args.head_count;
  const uint64_t blocks = Smaller(row_count / kWarps + 1, uint64_t{kMaxBlocks});
  if (row_count == 0) return {};
  return Launch(MergeTensorsKernel, {dim3(static_cast<uint32_t>(blocks)), kThreads, 0}, stream,
                args);
}

}  // namespace pqcached::kernels::cuda

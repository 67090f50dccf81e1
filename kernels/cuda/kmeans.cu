// k-means in three kernels: one assigns samples, one (with a block per cluster) sums the samples of
// each cluster, and one moves empty clusters.
//
// The second kernel reads the codes of all samples, one byte each, once per cluster; they stay in
// L2. Each sample is read once.
#include "kernels/cuda/kmeans.h"

#include "kernels/cuda/nearest.cuh"

namespace pqcached::kernels::cuda {
namespace {

constexpr uint32_t kMaxTasks = 65535;
constexpr uint32_t kMaxDim = 256;
constexpr uint32_t kMaxCentroids = 256;
constexpr uint32_t kMoveThreads = 128;
constexpr uint32_t kMoveWarps = kMoveThreads / kWarpThreads;
constexpr uint32_t kDimsPerLane = kMaxDim / kWarpThreads;

// Distances below this share of |sample|^2 are rounding errors; as on the CPU.
constexpr float kDistanceNoise = 1e-6f;

struct ClusterState {
  double inertia;
  uint32_t count;
  float farthest_distance;
  uint32_t farthest_sample;
};

constexpr size_t Aligned(size_t bytes) { return (bytes + 255) / 256 * 256; }

struct KMeansScratch {
  uint8_t* codes;          // [task, sample]
  float* distances;        // [task, sample]
  ClusterState* clusters;  // [task, centroid]
};

KMeansScratch CutScratch(const KMeansStepArgs& args) {
  auto* next = static_cast<std::byte*>(args.scratch);
  const size_t samples = size_t{args.task_count} * args.sample_count;
  KMeansScratch scratch;
  scratch.codes = reinterpret_cast<uint8_t*>(next);
  next += Aligned(samples);
  scratch.distances = reinterpret_cast<float*>(next);
  next += Aligned(samples * sizeof(float));
  scratch.clusters = reinterpret_cast<ClusterState*>(next);
  return scratch;
}

__global__ void AssignKernel(KMeansStepArgs args, KMeansScratch scratch) {
  auto& shared = Shared<NearestShared>();
  const KMeansTask task = args.tasks[blockIdx.y];
  const uint32_t first = blockIdx.x * kTileRows;
  const uint32_t count = Smaller(kTileRows, args.sample_count - first);
  FindNearest({args.dtype, task.rows + first * args.row_stride_bytes, args.row_stride_bytes, count,
               args.dim, task.centroids, args.centroid_count},
              shared);
  if (threadIdx.x >= count) return;
  const float norm = shared.sample_norms[threadIdx.x];
  float distance = norm - 2.0f * shared.best_scores[threadIdx.x];
  if (!(distance > kDistanceNoise * norm)) distance = 0.0f;
  const size_t sample = size_t{blockIdx.y} * args.sample_count + first + threadIdx.x;
  scratch.codes[sample] = static_cast<uint8_t>(shared.codes[threadIdx.x]);
  scratch.distances[sample] = distance;
}

struct MoveShared {
  double sums[kMoveWarps][kMaxDim];
  ClusterState states[kMoveWarps];
};

// Computes one cluster of one task. A warp examines 32 samples at a time and adds those of the
// cluster one after the other, one thread per dimension. The sums of the warps are then added in a
// fixed order.
__global__ void MoveKernel(KMeansStepArgs args, KMeansScratch scratch) {
  auto& shared = Shared<MoveShared>();
  const KMeansTask task = args.tasks[blockIdx.y];
  const uint32_t cluster = blockIdx.x;
  const uint8_t* codes = scratch.codes + size_t{blockIdx.y} * args.sample_count;
  const float* distances = scratch.distances + size_t{blockIdx.y} * args.sample_count;
  double sums[kDimsPerLane] = {};
  ClusterState state = {0.0, 0, 0.0f, 0};
  for (uint32_t first = WarpIndex() * kWarpThreads; first < args.sample_count;
       first += kMoveThreads) {
    const uint32_t own = first + LaneIndex();
    uint32_t members = __ballot_sync(kAllLanes, own < args.sample_count && codes[own] == cluster);
    while (members != 0) {
      const uint32_t sample = first + static_cast<uint32_t>(__ffs(members)) - 1;
      members &= members - 1;
      const std::byte* row = task.rows + sample * args.row_stride_bytes;
      PQC_UNROLL
      for (uint32_t i = 0; i < kDimsPerLane; ++i) {
        const uint32_t dim = i * kWarpThreads + LaneIndex();
        if (dim < args.dim) sums[i] += double{LoadFloat(args.dtype, row, dim)};
      }
      const float distance = distances[sample];
      ++state.count;
      state.inertia += double{distance};
      if (distance > state.farthest_distance) {
        state.farthest_distance = distance;
        state.farthest_sample = sample;
      }
    }
  }
  PQC_UNROLL
  for (uint32_t i = 0; i < kDimsPerLane; ++i) {
    shared.sums[WarpIndex()][i * kWarpThreads + LaneIndex()] = sums[i];
  }
  if (LaneIndex() == 0) shared.states[WarpIndex()] = state;
  __syncthreads();
  ClusterState all = {0.0, 0, 0.0f, 0};
  for (uint32_t warp = 0; warp < kMoveWarps; ++warp) {
    const ClusterState& part = shared.states[warp];
    all.inertia += part.inertia;
    all.count += part.count;
    const bool farther = part.farthest_distance > all.farthest_distance ||
                         (part.farthest_distance == all.farthest_distance && part.count > 0 &&
                          part.farthest_sample < all.farthest_sample);
    if (farther) {
      all.farthest_distance = part.farthest_distance;
      all.farthest_sample = part.farthest_sample;
    }
  }
  if (threadIdx.x == 0) scratch.clusters[size_t{blockIdx.y} * args.centroid_count + cluster] = all;
  if (all.count == 0) return;
  for (uint32_t dim = threadIdx.x; dim < args.dim; dim += kMoveThreads) {
    double sum = 0.0;
    for (uint32_t warp = 0; warp < kMoveWarps; ++warp) sum += shared.sums[warp][dim];
    task.centroids[size_t{cluster} * args.dim + dim] = static_cast<float>(sum / all.count);
  }
}

struct ReseedShared {
  ClusterState clusters[kMaxCentroids];
};

// Moves each empty cluster to the farthest sample of another cluster, as on the CPU; one warp per
// task.
__global__ void ReseedKernel(KMeansStepArgs args, KMeansScratch scratch) {
  auto& shared = Shared<ReseedShared>();
  const KMeansTask task = args.tasks[blockIdx.x];
  for (uint32_t c = threadIdx.x; c < args.centroid_count; c += kWarpThreads) {
    shared.clusters[c] = scratch.clusters[size_t{blockIdx.x} * args.centroid_count + c];
  }
  __syncthreads();
  KMeansStats stats;
  for (uint32_t c = 0; c < args.centroid_count; ++c) {
    stats.inertia += shared.clusters[c].inertia;
    if (shared.clusters[c].count != 0) continue;
    ++stats.empty_count;
    uint32_t farthest = 0;
    for (uint32_t other = 1; other < args.centroid_count; ++other) {
      if (shared.clusters[other].farthest_distance > shared.clusters[farthest].farthest_distance) {
        farthest = other;
      }
    }
    if (shared.clusters[farthest].farthest_distance <= 0.0f) continue;
    ++stats.reseeded_count;
    const std::byte* row =
        task.rows + shared.clusters[farthest].farthest_sample * args.row_stride_bytes;
    for (uint32_t dim = threadIdx.x; dim < args.dim; dim += kWarpThreads) {
      task.centroids[size_t{c} * args.dim + dim] = LoadFloat(args.dtype, row, dim);
    }
    __syncthreads();
    if (threadIdx.x == 0) shared.clusters[farthest].farthest_distance = 0.0f;
    __syncthreads();
  }
  if (threadIdx.x == 0) args.stats[blockIdx.x] = stats;
}

}  // namespace

size_t KMeansStepScratchBytes(uint32_t sample_count, uint32_t centroid_count, uint32_t task_count) {
  const size_t samples = size_t{task_count} * sample_count;
  return Aligned(samples) + Aligned(samples * sizeof(float)) +
         Aligned(size_t{task_count} * centroid_count * sizeof(ClusterState));
}

KernelStatus KMeansStep(const KMeansStepArgs& args, Stream stream) {
  const uint32_t count = args.centroid_count;
  if (count < 16 || count > kMaxCentroids || (count & (count - 1)) != 0 || args.dim == 0 ||
      args.dim > kMaxDim || args.task_count > kMaxTasks ||
      args.scratch_bytes < KMeansStepScratchBytes(args.sample_count, count, args.task_count)) {
    return {cudaErrorInvalidValue};
  }
  const KMeansScratch scratch = CutScratch(args);
  const uint32_t tiles = (args.sample_count + kTileRows - 1) / kTileRows;
  KernelStatus status =
      Launch(AssignKernel, {dim3(tiles, args.task_count), kNearestThreads, sizeof(NearestShared)},
             stream, args, scratch);
  if (!status.ok()) return status;
  status = Launch(MoveKernel, {dim3(count, args.task_count), kMoveThreads, sizeof(MoveShared)},
                  stream, args, scratch);
  if (!status.ok()) return status;
  return Launch(ReseedKernel, {dim3(args.task_count), kWarpThreads, sizeof(ReseedShared)}, stream,
                args, scratch);
}

}  // namespace pqcached::kernels::cuda

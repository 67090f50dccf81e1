// NearestCentroids finds the nearest of up to 256 centroids for the rows of one tile.
//
// It is a tiled product of samples and centroids in fp32 without tensor cores. A block takes
// kTileRows rows and processes kTileCentroids centroids at a time; dimensions pass through shared
// memory in pieces, and a thread computes 4 x 4 products. Tensor cores (in bf16, like the CPU's
// kAvx512Bf16) are the next step for speed.
//
// Included by encoding and k-means only.
#ifndef PQCACHED_KERNELS_CUDA_NEAREST_CUH_
#define PQCACHED_KERNELS_CUDA_NEAREST_CUH_

#include "kernels/cuda/elements.cuh"

namespace pqcached::kernels::cuda {

inline constexpr uint32_t kNearestThreads = 256;
inline constexpr uint32_t kTileRows = 64;
inline constexpr uint32_t kTileCentroids = 64;
inline constexpr uint32_t kTileDims = 16;
inline constexpr uint32_t kThreadRows = 4;
inline constexpr uint32_t kThreadCentroids = 4;
inline constexpr uint32_t kTileSide = 16;  // threads per side of the tile (rows, centroids)
static_assert(kTileSide * kTileSide == kNearestThreads && kTileSide * kThreadRows == kTileRows);

struct NearestShared {
  float samples[kTileDims][kTileRows + 1];
  float centroids[kTileDims][kTileCentroids + 1];
  // Scores x.c - |c|^2 / 2 of the tile: the centroid with the largest score is the nearest.
  float scores[kTileRows][kTileCentroids + 1];
  float best_scores[kTileRows];
  uint32_t codes[kTileRows];
  float sample_norms[kTileRows];  // |sample|^2
  float centroid_norms[kTileCentroids];
};

struct NearestTask {
  DType dtype;
  const std::byte* rows;  // first row of the tile
  size_t row_stride_bytes;
  uint32_t row_count;  // rows in the tile
  uint32_t dim;
  const float* centroids;  // [centroid_count, dim]
  uint32_t centroid_count;
  uint32_t gap = 0;  // numbers of a row between the halves of `dim`; 0: the sub-space is contiguous
};

// Computes codes, best_scores and sample_norms of the rows in shared memory. All threads of the
// block must call it.
__device__ inline void FindNearest(const NearestTask& task, NearestShared& shared) {
  const uint32_t row_side = threadIdx.x / kTileSide;
  const uint32_t centroid_side = threadIdx.x % kTileSide;
  __syncthreads();
  if (threadIdx.x < kTileRows) shared.sample_norms[threadIdx.x] = 0.0f;
  for (uint32_t first = 0; first < task.centroid_count; first += kTileCentroids) {
    const uint32_t count = Smaller(kTileCentroids, task.centroid_count - first);
    float products[kThreadRows][kThreadCentroids] = {};
    if (threadIdx.x < kTileCentroids) shared.centroid_norms[threadIdx.x] = 0.0f;
    for (uint32_t dim = 0; dim < task.dim; dim += kTileDims) {
      __syncthreads();
      for (uint32_t i = threadIdx.x; i < kTileDims * kTileRows; i += kNearestThreads) {
        const uint32_t d = dim + i % kTileDims;
        const uint32_t row = i / kTileDims;
        shared.samples[i % kTileDims][row] =
            d < task.dim && row < task.row_count
                ? LoadFloat(task.dtype, task.rows + row * task.row_stride_bytes,
                            d < task.dim / 2 ? d : d + task.gap)
                : 0.0f;
      }
      for (uint32_t i = threadIdx.x; i < kTileDims * kTileCentroids; i += kNearestThreads) {
        const uint32_t d = dim + i % kTileDims;
        const uint32_t c = i / kTileDims;
        shared.centroids[i % kTileDims][c] =
            d < task.dim && c < count ? task.centroids[size_t{first + c} * task.dim + d] : 0.0f;
      }
      __syncthreads();
      for (uint32_t d = 0; d < kTileDims; ++d) {
        PQC_UNROLL
        for (uint32_t i = 0; i < kThreadRows; ++i) {
          PQC_UNROLL
          for (uint32_t j = 0; j < kThreadCentroids; ++j) {
            products[i][j] += shared.samples[d][row_side + i * kTileSide] *
                              shared.centroids[d][centroid_side + j * kTileSide];
          }
        }
        if (threadIdx.x < kTileCentroids) {
          const float x = shared.centroids[d][threadIdx.x];
          shared.centroid_norms[threadIdx.x] += x * x;
        }
        if (first == 0 && threadIdx.x < kTileRows) {
          const float x = shared.samples[d][threadIdx.x];
          shared.sample_norms[threadIdx.x] += x * x;
        }
      }
    }
    __syncthreads();
    PQC_UNROLL
    for (uint32_t i = 0; i < kThreadRows; ++i) {
      PQC_UNROLL
      for (uint32_t j = 0; j < kThreadCentroids; ++j) {
        const uint32_t c = centroid_side + j * kTileSide;
        shared.scores[row_side + i * kTileSide][c] =
            products[i][j] - 0.5f * shared.centroid_norms[c];
      }
    }
    __syncthreads();
    // One thread per row compares the centroids in order, so ties go to the lowest index.
    if (threadIdx.x < kTileRows) {
      float best = first == 0 ? -INFINITY : shared.best_scores[threadIdx.x];
      uint32_t code = first == 0 ? 0 : shared.codes[threadIdx.x];
      for (uint32_t c = 0; c < count; ++c) {
        if (shared.scores[threadIdx.x][c] > best) {
          best = shared.scores[threadIdx.x][c];
          code = first + c;
        }
      }
      shared.best_scores[threadIdx.x] = best;
      shared.codes[threadIdx.x] = code;
    }
  }
  __syncthreads();
}

}  // namespace pqcached::kernels::cuda

#endif  // PQCACHED_KERNELS_CUDA_NEAREST_CUH_

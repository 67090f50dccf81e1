// Codes and codebooks on the device: PqEncode, and single k-means steps, for all kv heads and
// sub-spaces of a layer at once.
//
// The definitions are those of kernels/train/pq_encode.h and kernels/train/kmeans.h, with the
// rounding that their instruction-set variants may have. Deterministic on one device: sums are
// added in a fixed order, without atomics.
#ifndef PQCACHED_KERNELS_CUDA_KMEANS_H_
#define PQCACHED_KERNELS_CUDA_KMEANS_H_

#include <cstddef>
#include <cstdint>

#include "kernels/base/dtype.h"
#include "kernels/cuda/status.h"
#include "kernels/select/pq.h"

namespace pqcached::kernels::cuda {

// Keys of one kv head.
struct EncodeTask {
  const std::byte* rows = nullptr;   // first byte of the key of the first row
  const float* centroids = nullptr;  // [subspace_count, 2^bits, key_dim / subspace_count]
  uint8_t* planes = nullptr;         // plane that contains slot 0
  size_t plane_stride = 0;
  uint32_t row_count = 0;   // at most row_capacity
  uint32_t first_slot = 0;  // slot of the first row
};

struct PqEncodeArgs {
  PqGeometry geometry;
  DType dtype = DType::kF16;
  size_t row_stride_bytes = 0;
  uint32_t row_capacity = 0;          // rows of the largest task
  uint32_t task_capacity = 0;         // at most 65535
  const EncodeTask* tasks = nullptr;  // [task_capacity], in device memory
};

// Writes the codes of all rows of all tasks; one launch.
//
// Errors: those of the launch; cudaErrorInvalidValue when a number is out of range.
KernelStatus PqEncode(const PqEncodeArgs& args, Stream stream);

// One sub-space of one kv head.
struct KMeansTask {
  const std::byte* rows = nullptr;  // first sample, at the first byte of the sub-space
  float* centroids = nullptr;       // [centroid_count, dim]
};

struct KMeansStats {
  double inertia = 0.0;  // of the assignment, before the centroids moved
  uint32_t empty_count = 0;
  uint32_t reseeded_count = 0;
};

struct KMeansStepArgs {
  DType dtype = DType::kF16;
  size_t row_stride_bytes = 0;  // between consecutive samples
  uint32_t sample_count = 0;
  uint32_t dim = 0;                   // 1 to 256
  uint32_t centroid_count = 0;        // 16, 32, 64, 128 or 256
  uint32_t task_count = 0;            // at most 65535
  const KMeansTask* tasks = nullptr;  // [task_count], in device memory
  KMeansStats* stats = nullptr;       // [task_count], in device memory, overwritten
  void* scratch = nullptr;            // KMeansStepScratchBytes, 256-byte aligned
  size_t scratch_bytes = 0;
};

size_t KMeansStepScratchBytes(uint32_t sample_count, uint32_t centroid_count, uint32_t task_count);

// Runs one step of every task: assigns samples, moves centroids to the means, and moves empty
// clusters to far samples; 3 launches. The centroids are usable after each step (the CPU's
// KMeansInit draws the first ones).
//
// Errors: as above.
KernelStatus KMeansStep(const KMeansStepArgs& args, Stream stream);

}  // namespace pqcached::kernels::cuda

#endif  // PQCACHED_KERNELS_CUDA_KMEANS_H_

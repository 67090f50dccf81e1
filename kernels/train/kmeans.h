// k-means of one sub-space: load samples, initialise, then run one step at a time.
//
// *Samples* are keys of one sub-space in compact form, [sample_count, dim], fp32 or bf16. The
// caller runs the loop, so that it can stop after any step (deadline, cancellation, iteration
// count): the centroids are usable after KMeansInit and after every KMeansStep. Results are
// deterministic for one instruction set; instruction sets differ in rounding.
#ifndef PQCACHED_KERNELS_TRAIN_KMEANS_H_
#define PQCACHED_KERNELS_TRAIN_KMEANS_H_

#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/base/dtype.h"
#include "kernels/base/exec.h"

namespace pqcached::kernels {

// Returns the sample type (fp32 or bf16) that is fastest with `exec`. bf16 samples increase the
// inertia by about 5e-5.
DType KMeansSampleType(const Exec& exec);

struct KMeansLoadArgs {
  DType source_type = DType::kF32;  // dtype of the rows
  const std::byte* rows = nullptr;  // first row to load, at the first byte of the sub-space
  size_t row_stride = 0;  // bytes between loaded rows (a multiple of the row stride skips rows)
  uint32_t row_count = 0;
  uint32_t dim = 0;
  // Bytes from the first half of a sub-space to the second one (PairOffset); 0: it is contiguous.
  size_t pair_offset_bytes = 0;
  DType sample_type = DType::kF32;  // fp32 or bf16
  std::byte* samples = nullptr;     // [row_count, dim] of sample_type, overwritten
};

// Copies rows to samples and converts them.
void KMeansLoad(const Exec& exec, const KMeansLoadArgs& args);

struct KMeansProblem {
  DType sample_type = DType::kF32;     // fp32 or bf16
  const std::byte* samples = nullptr;  // [sample_count, dim], aligned for its type; finite
  uint32_t sample_count = 0;
  uint32_t dim = 0;             // >= 1
  uint32_t centroid_count = 0;  // a power of two, 2 to 256
  std::span<float> centroids;   // [centroid_count, dim]
};

// Sets the centroids to distinct samples drawn with `seed`. With fewer samples than centroids, the
// samples repeat in order: a repeated centroid is never the nearest, because ties go to the lowest
// index. Without samples all centroids are zero.
void KMeansInit(const KMeansProblem& problem, uint64_t seed);

struct KMeansStats {
  double inertia =
      0.0;  // sum of squared distances to the nearest centroid, before the centroids moved
  uint32_t empty_count = 0;     // clusters without samples
  uint32_t reseeded_count = 0;  // empty clusters that were moved to a sample far from its centroid
};

size_t KMeansStepScratchBytes(uint32_t dim, uint32_t centroid_count);

// Assigns every sample to its nearest centroid (squared Euclidean distance; ties: lowest index) and
// moves every centroid to the mean of its samples, in one pass. Each empty cluster moves to the
// sample of another cluster that is farthest from its centroid; it stays in place when all those
// distances are zero.
//
// REQUIRES: shapes as above; scratch of KMeansStepScratchBytes, 64-byte aligned.
KMeansStats KMeansStep(const Exec& exec, const KMeansProblem& problem,
                       std::span<std::byte> scratch);

}  // namespace pqcached::kernels

#endif  // PQCACHED_KERNELS_TRAIN_KMEANS_H_

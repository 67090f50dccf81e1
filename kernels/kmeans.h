// k-means of one sub-space: load samples, initialise, then one step at a time.
//
// *Samples* are keys of one sub-space made compact, [sample_count, dim], fp32 or bf16. The loop is
// the caller's, so that it can stop after any step (deadline, cancel, iteration count): the
// centroids are usable after KMeansInit and after every KMeansStep. For one level all of it is
// deterministic; levels differ in rounding.
#ifndef PQCACHED_KERNELS_KMEANS_H_
#define PQCACHED_KERNELS_KMEANS_H_

#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/dtype.h"
#include "kernels/exec.h"

namespace pqcached::kernels {

// Returns the type of samples (fp32 or bf16) with which `exec` is fastest. bf16 samples cost about
// 5e-5 of inertia.
DType KMeansSampleType(const Exec& exec);

struct KMeansLoadArgs {
  DType source_type = DType::kF32;  // of the rows
  const std::byte* rows = nullptr;  // of the first row to take, at the first byte of the sub-space
  size_t row_stride =
      0;  // bytes from one taken row to the next (a multiple of the stride skips rows)
  uint32_t row_count = 0;
  uint32_t dim = 0;
  DType sample_type = DType::kF32;  // fp32 or bf16
  std::byte* samples = nullptr;     // [row_count, dim] of sample_type, overwritten
};

// Copies rows into samples, with conversion.
void KMeansLoad(const Exec& exec, const KMeansLoadArgs& args);

struct KMeansProblem {
  DType sample_type = DType::kF32;     // fp32 or bf16
  const std::byte* samples = nullptr;  // [sample_count, dim], aligned for its type; finite
  uint32_t sample_count = 0;
  uint32_t dim = 0;             // >= 1
  uint32_t centroid_count = 0;  // 16, 32, 64, 128 or 256
  std::span<float> centroids;   // [centroid_count, dim]
};

// Sets the centroids to distinct samples drawn by `seed`. With fewer samples than centroids they
// repeat in order: a repeated centroid is never the nearest, because ties go to the lowest index.
// Without samples all are zero.
void KMeansInit(const KMeansProblem& problem, uint64_t seed);

struct KMeansStats {
  double inertia =
      0.0;  // sum of squared distances to the nearest centroid, before the centroids moved
  uint32_t empty_count = 0;     // clusters that no sample was nearest to
  uint32_t reseeded_count = 0;  // of those, how many were moved onto a sample far from its centroid
};

size_t KMeansStepScratchBytes(uint32_t dim, uint32_t centroid_count);

// Assigns every sample to its nearest centroid (squared Euclidean distance; ties: lowest index) and
// moves every centroid to the mean of its samples, in one pass. An empty cluster moves onto the
// sample that is farthest from its centroid, each onto the farthest sample of another cluster; it
// stays where it is when all those distances are zero.
//
// REQUIRES: shapes as above; scratch of KMeansStepScratchBytes, 64-byte aligned.
KMeansStats KMeansStep(const Exec& exec, const KMeansProblem& problem,
                       std::span<std::byte> scratch);

}  // namespace pqcached::kernels

#endif  // PQCACHED_KERNELS_KMEANS_H_

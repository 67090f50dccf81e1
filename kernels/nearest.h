// Nearest centroids of a block of samples in one sub-space: the inner part of k-means and of
// encoding.
//
// Shared by kmeans.cc and pq_encode.cc; nobody else includes it. Distances are squared and
// Euclidean.
#ifndef PQCACHED_KERNELS_NEAREST_H_
#define PQCACHED_KERNELS_NEAREST_H_

#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/exec.h"

namespace pqcached::kernels {

// Samples per call at most, so that the caller's buffers stay in the first cache level.
inline constexpr uint32_t kNearestBlock = 128;

// Centroids in the forms that the variants read. All parts but `rows` lie in the caller's scratch.
struct NearestCentroids {
  uint32_t dim = 0;
  uint32_t count = 0;               // a multiple of 16, at most 256
  const float* rows = nullptr;      // [count, dim]
  const float* columns = nullptr;   // [dim, count]
  const float* bias = nullptr;      // [count]: -|c|^2 / 2
  const uint32_t* pairs = nullptr;  // [ceil(dim / 2), count]: bf16 of dims 2i (low half) and 2i + 1
};

size_t NearestScratchBytes(uint32_t dim, uint32_t count);

// REQUIRES: centroids [count, dim] outlive the result; scratch is 64-byte aligned.
NearestCentroids PrepareNearest(const Exec& exec, std::span<const float> centroids, uint32_t dim,
                                std::span<std::byte> scratch);

// Sets codes[s] to the nearest centroid of sample s (ties: lowest index) and scores[s] to
// (|sample|^2 - distance) / 2, up to rounding.
//
// REQUIRES: sample_count <= kNearestBlock; samples [sample_count, dim] compact.
void FindNearest(const Exec& exec, const NearestCentroids& centroids, const float* samples,
                 uint32_t sample_count, uint8_t* codes, float* scores);

// The same for bf16 samples with centroids rounded to bf16. Rows of `samples` are 2 * ceil(dim / 2)
// long, a zero at the end where dim is odd.
//
// REQUIRES: HasBf16Nearest(exec).
void FindNearestBf16(const Exec& exec, const NearestCentroids& centroids, const uint16_t* samples,
                     uint32_t sample_count, uint8_t* codes, float* scores);
bool HasBf16Nearest(const Exec& exec);

}  // namespace pqcached::kernels

#endif  // PQCACHED_KERNELS_NEAREST_H_

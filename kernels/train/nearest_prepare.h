// NearestOps of an instruction set, and the preparation of the centroid layouts that they read.
#ifndef PQCACHED_KERNELS_TRAIN_NEAREST_PREPARE_H_
#define PQCACHED_KERNELS_TRAIN_NEAREST_PREPARE_H_

#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/base/exec.h"
#include "kernels/train/nearest.h"

namespace pqcached::kernels {

NearestOps NearestOpsFor(const Exec& exec);

size_t NearestScratchBytes(uint32_t dim, uint32_t count);

// Computes the layouts of `centroids` in `scratch`.
// REQUIRES: centroids [count, dim] outlive the result; scratch is 64-byte aligned; dim is even
// unless there are no pairs.
NearestCentroids PrepareNearest(std::span<const float> centroids, uint32_t dim, PairForm pair_form,
                                std::span<std::byte> scratch);

}  // namespace pqcached::kernels

#endif  // PQCACHED_KERNELS_TRAIN_NEAREST_PREPARE_H_

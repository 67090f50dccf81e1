// PqEncode converts keys to codes, for one row or many.
#ifndef PQCACHED_KERNELS_TRAIN_PQ_ENCODE_H_
#define PQCACHED_KERNELS_TRAIN_PQ_ENCODE_H_

#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/base/dtype.h"
#include "kernels/base/exec.h"
#include "kernels/select/pq.h"

namespace pqcached::kernels {

struct PqEncodeArgs {
  PqGeometry geometry;
  DType dtype = DType::kF32;        // dtype of the rows
  const std::byte* rows = nullptr;  // first byte of the key of the first row
  size_t row_stride = 0;            // bytes
  uint32_t row_count = 0;
  std::span<const float> centroids;  // [subspace_count, 2^bits, key_dim / subspace_count]
  uint8_t* planes = nullptr;         // plane that contains slot 0
  size_t plane_stride = 0;
  uint32_t first_slot = 0;       // slot of the first row
  std::span<std::byte> scratch;  // PqEncodeScratchBytes, 64-byte aligned
};

size_t PqEncodeScratchBytes(const PqGeometry& geometry);

// Writes the codes of row r to slot first_slot + r of the planes, and to no other slot. The code in
// a sub-space is the index of the centroid with the smallest squared Euclidean distance; among
// equal centroids, the lowest index.
//
// REQUIRES: IsValid(geometry); keys are finite (others get some valid code); shapes as above.
// Instruction sets round differently: a centroid may be chosen if its squared distance exceeds the
// smallest one by at most 1e-5 * (|key|^2 + |centroid|^2) of the sub-space.
void PqEncode(const Exec& exec, const PqEncodeArgs& args);

}  // namespace pqcached::kernels

#endif  // PQCACHED_KERNELS_TRAIN_PQ_ENCODE_H_

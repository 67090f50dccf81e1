#include "kernels/pq_encode.h"

#include <algorithm>

#include "kernels/check.h"
#include "kernels/nearest.h"
#include "kernels/scratch_cutter.h"

namespace pqcached::kernels {
namespace {

// Encodes rows [first, first + count) in one sub-space.
void EncodeBlock(const Exec& exec, const PqEncodeArgs& args, uint32_t subspace,
                 const NearestCentroids& nearest, std::span<float> samples, uint32_t first,
                 uint32_t count) {
  const uint32_t dim = SubspaceDim(args.geometry);
  const size_t offset_bytes = size_t{subspace} * dim * DTypeBytes(args.dtype);
  for (uint32_t row = 0; row < count; ++row) {
    const std::byte* key = args.rows + (size_t{first} + row) * args.row_stride + offset_bytes;
    ConvertElements(args.dtype, key, DType::kF32,
                    reinterpret_cast<std::byte*>(samples.data() + size_t{row} * dim), dim);
  }
  uint8_t codes[kNearestBlock];
  float scores[kNearestBlock];
  FindNearest(exec, nearest, samples.data(), count, codes, scores);
  for (uint32_t row = 0; row < count; ++row) {
    SetCode(args.geometry, args.planes, args.plane_stride, subspace, args.first_slot + first + row,
            codes[row]);
  }
}

}  // namespace

size_t PqEncodeScratchBytes(const PqGeometry& geometry) {
  const uint32_t dim = SubspaceDim(geometry);
  return ScratchAligned(size_t{kNearestBlock} * dim * sizeof(float)) +
         NearestScratchBytes(dim, CentroidCount(geometry));
}

void PqEncode(const Exec& exec, const PqEncodeArgs& args) {
  PQC_CHECK(IsValid(args.geometry));
  PQC_CHECK(args.centroids.size() == CentroidFloats(args.geometry));
  PQC_CHECK(args.scratch.size() >= PqEncodeScratchBytes(args.geometry));
  const uint32_t dim = SubspaceDim(args.geometry);
  const size_t subspace_floats = size_t{CentroidCount(args.geometry)} * dim;
  ScratchCutter cutter(args.scratch);
  const std::span<float> samples = cutter.Take<float>(size_t{kNearestBlock} * dim);
  const std::span<std::byte> nearest_scratch =
      cutter.Take<std::byte>(NearestScratchBytes(dim, CentroidCount(args.geometry)));
  for (uint32_t subspace = 0; subspace < args.geometry.subspace_count; ++subspace) {
    const NearestCentroids nearest =
        PrepareNearest(exec, args.centroids.subspan(subspace * subspace_floats, subspace_floats),
                       dim, nearest_scratch);
    for (uint32_t first = 0; first < args.row_count; first += kNearestBlock) {
      const uint32_t count = std::min(kNearestBlock, args.row_count - first);
      EncodeBlock(exec, args, subspace, nearest, samples, first, count);
    }
  }
}

}  // namespace pqcached::kernels

#include "kernels/train/pq_encode.h"

#include <algorithm>

#include "kernels/base/check.h"
#include "kernels/base/sample_load.h"
#include "kernels/base/scratch_cutter.h"
#include "kernels/train/nearest_prepare.h"

namespace pqcached::kernels {
namespace {

// Smallest number of rows for which preparing the centroids pays off.
constexpr uint32_t kMinPreparedRows = 12;

struct RowBlock {
  uint32_t first = 0;
  uint32_t count = 0;
};

// Copies the sub-space of some rows to samples, [block.count, dim].
void LoadBlock(const Exec& exec, const PqEncodeArgs& args, uint32_t subspace, RowBlock block,
               std::span<float> samples) {
  const size_t number_bytes = DTypeBytes(args.dtype);
  const size_t offset_bytes = DimOf(args.geometry, subspace, 0) * number_bytes;
  LoadSamples(exec, {.source_type = args.dtype,
                     .rows = args.rows + block.first * args.row_stride + offset_bytes,
                     .row_stride = args.row_stride,
                     .row_count = block.count,
                     .dim = SubspaceDim(args.geometry),
                     .pair_offset_bytes = PairOffset(args.geometry, subspace) * number_bytes,
                     .sample_type = DType::kF32,
                     .samples = reinterpret_cast<std::byte*>(samples.data())});
}

void StoreCodes(const PqEncodeArgs& args, uint32_t subspace, RowBlock block, const uint8_t* codes) {
  for (uint32_t row = 0; row < block.count; ++row) {
    SetCode(args.geometry, args.planes, args.plane_stride, subspace,
            args.first_slot + block.first + row, codes[row]);
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
  if (args.row_count == 0) return;  // `rows` may be null
  const NearestOps ops = NearestOpsFor(exec);
  uint8_t codes[kNearestBlock];
  float scores[kNearestBlock];
  for (uint32_t subspace = 0; subspace < args.geometry.subspace_count; ++subspace) {
    const std::span<const float> centroids =
        args.centroids.subspan(subspace * subspace_floats, subspace_floats);
    if (args.row_count < kMinPreparedRows) {
      const RowBlock block{.first = 0, .count = args.row_count};
      LoadBlock(exec, args, subspace, block, samples);
      for (uint32_t row = 0; row < block.count; ++row) {
        codes[row] =
            static_cast<uint8_t>(ops.find_one(centroids.data(), CentroidCount(args.geometry), dim,
                                              samples.data() + size_t{row} * dim));
      }
      StoreCodes(args, subspace, block, codes);
      continue;
    }
    const NearestCentroids nearest =
        PrepareNearest(centroids, dim, PairForm::kNone, nearest_scratch);
    for (uint32_t first = 0; first < args.row_count; first += kNearestBlock) {
      const RowBlock block{.first = first,
                           .count = std::min(kNearestBlock, args.row_count - first)};
      LoadBlock(exec, args, subspace, block, samples);
      ops.find(nearest, samples.data(), block.count, codes, scores);
      StoreCodes(args, subspace, block, codes);
    }
  }
}

}  // namespace pqcached::kernels

#include "kernels/cuda/kmeans.h"
#include "kernels/cuda/nearest.cuh"

namespace pqcached::kernels::cuda {
namespace {

constexpr uint32_t kMaxTasks = 65535;

// Encodes kTileRows rows of one task in one plane per block. A plane of nibbles contains two
// sub-spaces, both encoded by the same block, so that every byte is written once.
__global__ void PqEncodeKernel(PqEncodeArgs args) {
  const EncodeTask task = args.tasks[blockIdx.y];
  const uint32_t first_row = blockIdx.x * kTileRows;
  if (first_row >= task.row_count) return;
  auto& shared = Shared<NearestShared>();
  const uint32_t row_count = Smaller(kTileRows, task.row_count - first_row);
  const uint32_t dim = SubspaceDim(args.geometry);
  const uint32_t plane = blockIdx.z;
  const uint32_t per_plane = HasNibblePlanes(args.geometry) ? 2 : 1;
  uint32_t byte = 0;
  for (uint32_t i = 0; i < per_plane; ++i) {
    const uint32_t subspace = plane * per_plane + i;
    const size_t offset = size_t{subspace} * dim;
    const uint32_t pair_offset = PairOffset(args.geometry, subspace);
    FindNearest(
        {args.dtype,
         task.rows + first_row * args.row_stride_bytes +
             DimOf(args.geometry, subspace, 0) * ElementBytes(args.dtype),
         args.row_stride_bytes, row_count, dim, task.centroids + (offset << args.geometry.bits),
         CentroidCount(args.geometry), pair_offset == 0 ? 0 : pair_offset - dim / 2},
        shared);
    if (threadIdx.x < kTileRows) byte |= shared.codes[threadIdx.x] << i * 4;
  }
  if (threadIdx.x < row_count) {
    task.planes[plane * task.plane_stride + task.first_slot + first_row + threadIdx.x] =
        static_cast<uint8_t>(byte);
  }
}

}  // namespace

KernelStatus PqEncode(const PqEncodeArgs& args, Stream stream) {
  if (!IsValid(args.geometry) || !HasSelect(args.geometry) || args.task_capacity > kMaxTasks)
    return {cudaErrorInvalidValue};
  const uint32_t tiles = (args.row_capacity + kTileRows - 1) / kTileRows;
  return Launch(PqEncodeKernel,
                {dim3(tiles, args.task_capacity, PlaneCount(args.geometry)), kNearestThreads,
                 sizeof(NearestShared)},
                stream, args);
}

}  // namespace pqcached::kernels::cuda

#include "kernels/cuda/select/pq_table.h"

#include "kernels/cuda/launch.cuh"

namespace pqcached::kernels::cuda {
namespace {

constexpr uint32_t kThreads = 128;
constexpr uint32_t kHeadsAtOnce = 4;
constexpr uint32_t kMaxGroupSize = 64;
constexpr uint32_t kMaxTasks = 65535;  // limit of a grid's second dimension

// One thread computes one entry [subspace, code] for all heads, kHeadsAtOnce in one pass over the
// centroid.
__global__ void BuildTablesKernel(BuildTablesArgs args) {
  const TableTask task = args.tasks[blockIdx.y];
  const uint32_t entry_count = args.geometry.subspace_count << args.geometry.bits;
  const uint32_t entry = blockIdx.x * kThreads + threadIdx.x;
  if (task.queries == nullptr || entry >= entry_count) return;
  const uint32_t dim = args.geometry.key_dim / args.geometry.subspace_count;
  const float* centroid = task.centroids + size_t{entry} * dim;
  PqGeometry geometry = args.geometry;
  geometry.paired_dims = task.paired_dims;
  const uint32_t subspace = entry >> geometry.bits;
  // The numbers of a sub-space are those from its first dim on, the second half `gap` dims later.
  const uint32_t half = dim / 2;
  const uint32_t offset = PairOffset(geometry, subspace);
  const uint32_t gap = offset == 0 ? 0 : offset - half;
  const float* query = task.queries + DimOf(geometry, subspace, 0);
  float* out = args.tables + size_t{blockIdx.y} * args.group_size * entry_count + entry;
  for (uint32_t first = 0; first < args.group_size; first += kHeadsAtOnce) {
    const uint32_t count = Smaller(kHeadsAtOnce, args.group_size - first);
    float sums[kHeadsAtOnce] = {};
    PQC_UNROLL_4
    for (uint32_t i = 0; i < dim; ++i) {
      const float of_centroid = centroid[i];
      PQC_UNROLL
      for (uint32_t head = 0; head < kHeadsAtOnce; ++head) {
        if (head < count) {
          sums[head] +=
              query[head * args.geometry.key_dim + i + (i < half ? 0 : gap)] * of_centroid;
        }
      }
    }
    PQC_UNROLL
    for (uint32_t head = 0; head < kHeadsAtOnce; ++head) {
      if (head < count) out[head * entry_count] = args.scale * sums[head];
    }
    query += kHeadsAtOnce * args.geometry.key_dim;
    out += kHeadsAtOnce * entry_count;
  }
}

}  // namespace

KernelStatus BuildTables(const BuildTablesArgs& args, Stream stream) {
  if (!IsValid(args.geometry) || !HasSelect(args.geometry) || args.group_size == 0 ||
      args.group_size > kMaxGroupSize || args.task_capacity > kMaxTasks) {
    return {cudaErrorInvalidValue};
  }
  const auto entry_count = static_cast<uint32_t>(TableFloats(args.geometry));
  const LaunchShape shape = {dim3((entry_count + kThreads - 1) / kThreads, args.task_capacity),
                             kThreads, 0};
  return Launch(BuildTablesKernel, shape, stream, args);
}

}  // namespace pqcached::kernels::cuda

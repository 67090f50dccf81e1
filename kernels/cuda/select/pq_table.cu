#include "kernels/cuda/select/pq_table.h"

#include "kernels/cuda/launch.cuh"

namespace pqcached::kernels::cuda {
namespace {

constexpr uint32_t kThreads = 128;
constexpr uint32_t kMaxGroupSize = 64;
constexpr uint32_t kMaxTasks = 65535;  // limit of a grid's second dimension

// One thread computes one entry [subspace, code] for all heads: a centroid is read once and stays
// in the cache for all heads. The queries of a group fit there too.
__global__ void BuildTablesKernel(BuildTablesArgs args) {
  const TableTask task = args.tasks[blockIdx.y];
  const uint32_t entry_count = args.geometry.subspace_count << args.geometry.bits;
  const uint32_t entry = blockIdx.x * kThreads + threadIdx.x;
  if (task.queries == nullptr || entry >= entry_count) return;
  const uint32_t dim = args.geometry.key_dim / args.geometry.subspace_count;
  const float* centroid = task.centroids + size_t{entry} * dim;
  const float* query = task.queries + (entry >> args.geometry.bits) * dim;
  float* out = args.tables + size_t{blockIdx.y} * args.group_size * entry_count + entry;
  for (uint32_t head = 0; head < args.group_size; ++head) {
    float sum = 0.0f;
    for (uint32_t i = 0; i < dim; ++i) sum += query[i] * centroid[i];
    *out = args.scale * sum;
    query += args.geometry.key_dim;
    out += entry_count;
  }
}

}  // namespace

KernelStatus BuildTables(const BuildTablesArgs& args, Stream stream) {
  if (!IsValid(args.geometry) || args.group_size == 0 || args.group_size > kMaxGroupSize ||
      args.task_capacity > kMaxTasks) {
    return {cudaErrorInvalidValue};
  }
  const auto entry_count = static_cast<uint32_t>(TableFloats(args.geometry));
  const LaunchShape shape = {dim3((entry_count + kThreads - 1) / kThreads, args.task_capacity),
                             kThreads, 0};
  return Launch(BuildTablesKernel, shape, stream, args);
}

}  // namespace pqcached::kernels::cuda

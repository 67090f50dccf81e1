#include "kernels/cuda/select/pq_table.h"

#include "kernels/cuda/launch.cuh"

namespace pqcached::kernels::cuda {
namespace {

constexpr uint32_t kThreads = 128;
constexpr uint32_t kHeadsAtOnce = 4;
constexpr uint32_t kTileDims = 32;
constexpr uint32_t kMaxGroupSize = 64;
constexpr uint32_t kMaxTasks = 65535;  // limit of a grid's second dimension

struct TableShared {
  float centroids[kThreads][kTileDims + 1];  // padded, so that a warp reads 32 banks
};

// One thread computes one entry [subspace, code] for all heads, kHeadsAtOnce in one pass over the
// centroid. The centroids of a block's entries are loaded by tiles of kTileDims numbers, neighbours
// by neighbouring threads.
class TableBlock {
 public:
  __device__ explicit TableBlock(const BuildTablesArgs& args)
      : args_(args),
        task_(args.tasks[blockIdx.y]),
        entry_count_(args.geometry.subspace_count << args.geometry.bits),
        dim_(args.geometry.key_dim / args.geometry.subspace_count),
        first_entry_(blockIdx.x * kThreads),
        entry_(first_entry_ + threadIdx.x) {}

  __device__ void Run() const {
    if (task_.queries == nullptr) return;
    for (uint32_t first = 0; first < args_.group_size; first += kHeadsAtOnce) BuildHeads(first);
  }

 private:
  __device__ void BuildHeads(uint32_t first_head) const {
    const uint32_t count = Smaller(kHeadsAtOnce, args_.group_size - first_head);
    const uint32_t subspace = Smaller(entry_, entry_count_ - 1) >> args_.geometry.bits;
    const float* const query =
        task_.queries + size_t{first_head} * args_.geometry.key_dim + subspace * dim_;
    float sums[kHeadsAtOnce] = {};
    for (uint32_t first_dim = 0; first_dim < dim_; first_dim += kTileDims) {
      const uint32_t dims = Smaller(kTileDims, dim_ - first_dim);
      LoadTile(first_dim, dims);
      const float* const centroid = Shared<TableShared>().centroids[threadIdx.x];
      PQC_UNROLL_4
      for (uint32_t i = 0; i < dims; ++i) {
        PQC_UNROLL
        for (uint32_t head = 0; head < kHeadsAtOnce; ++head) {
          if (head >= count) break;
          sums[head] += query[head * args_.geometry.key_dim + first_dim + i] * centroid[i];
        }
      }
    }
    if (entry_ >= entry_count_) return;
    const size_t table = size_t{blockIdx.y} * args_.group_size + first_head;
    PQC_UNROLL
    for (uint32_t head = 0; head < kHeadsAtOnce; ++head) {
      if (head < count)
        args_.tables[(table + head) * entry_count_ + entry_] = args_.scale * sums[head];
    }
  }

  // Loads numbers [first_dim, first_dim + dims) of the centroids of the block's entries.
  __device__ void LoadTile(uint32_t first_dim, uint32_t dims) const {
    auto& shared = Shared<TableShared>();
    __syncthreads();  // the tile before has been read
    PQC_UNROLL_4
    for (uint32_t i = threadIdx.x; i < kThreads * kTileDims; i += kThreads) {
      const uint32_t entry = i / kTileDims;
      const uint32_t dim = i % kTileDims;
      if (dim >= dims || first_entry_ + entry >= entry_count_) continue;
      shared.centroids[entry][dim] =
          task_.centroids[size_t{first_entry_ + entry} * dim_ + first_dim + dim];
    }
    __syncthreads();
  }

  const BuildTablesArgs& args_;
  const TableTask task_;
  uint32_t entry_count_;
  uint32_t dim_;
  uint32_t first_entry_;
  uint32_t entry_;
};

__global__ void __launch_bounds__(kThreads) BuildTablesKernel(BuildTablesArgs args) {
  TableBlock(args).Run();
}

}  // namespace

KernelStatus BuildTables(const BuildTablesArgs& args, Stream stream) {
  if (!IsValid(args.geometry) || args.group_size == 0 || args.group_size > kMaxGroupSize ||
      args.task_capacity > kMaxTasks) {
    return {cudaErrorInvalidValue};
  }
  const auto entry_count = static_cast<uint32_t>(TableFloats(args.geometry));
  const LaunchShape shape = {dim3((entry_count + kThreads - 1) / kThreads, args.task_capacity),
                             kThreads, sizeof(TableShared)};
  return Launch(BuildTablesKernel, shape, stream, args);
}

}  // namespace pqcached::kernels::cuda

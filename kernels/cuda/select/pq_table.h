// BuildTables on the device: the tables of all kv heads of a layer and of a batch of sequences in
// one launch.
#ifndef PQCACHED_KERNELS_CUDA_SELECT_PQ_TABLE_H_
#define PQCACHED_KERNELS_CUDA_SELECT_PQ_TABLE_H_

#include <cstdint>

#include "kernels/cuda/status.h"
#include "kernels/select/pq.h"

namespace pqcached::kernels::cuda {

// One codebook, and the queries of one kv head.
struct TableTask {
  const float* queries = nullptr;    // [G, key_dim]; null: the task is unused
  const float* centroids = nullptr;  // [subspace_count, 2^bits, key_dim / subspace_count]
  uint32_t paired_dims = 0;          // how the codebook's sub-spaces are cut (PqGeometry)
};

struct BuildTablesArgs {
  PqGeometry geometry;               // its paired_dims are those of the tasks
  uint32_t group_size = 0;           // G, 1 to 64
  float scale = 1.0f;                // softmax scale, applied here
  uint32_t task_capacity = 0;        // at most 65535
  const TableTask* tasks = nullptr;  // [task_capacity], in device memory
  float* tables = nullptr;           // [task_capacity, G, subspace_count, 2^bits]; those of tasks
                                     // without queries stay as they are
};

// Computes the tables of kernels::BuildTables, within its bound on rounding. Tables of unused tasks
// stay unchanged.
//
// Errors: those of the launch. cudaErrorInvalidValue when the geometry, group_size or task_capacity
// is out of range.
KernelStatus BuildTables(const BuildTablesArgs& args, Stream stream);

}  // namespace pqcached::kernels::cuda

#endif  // PQCACHED_KERNELS_CUDA_SELECT_PQ_TABLE_H_

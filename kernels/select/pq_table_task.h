// The variants of BuildTables, on raw pointers so that the instruction-set files need no standard
// headers.
//
// Included by pq_table.cc and the instruction-set files only.
#ifndef PQCACHED_KERNELS_SELECT_PQ_TABLE_TASK_H_
#define PQCACHED_KERNELS_SELECT_PQ_TABLE_TASK_H_

#include <cstddef>
#include <cstdint>

namespace pqcached::kernels {

// One sub-space: tables[g * table_stride + c] = scale * queries[g * query_stride, dim] .
// centroids[c, dim].
struct TableTask {
  uint32_t group_size;
  const float* queries;
  size_t query_stride;
  float scale;
  const float* centroids;
  uint32_t centroid_count;  // a multiple of 16
  uint32_t dim;
  float* tables;
  size_t table_stride;
};

void BuildTablePortable(const TableTask& task);
void BuildTableAvx2(const TableTask& task);

}  // namespace pqcached::kernels

#endif  // PQCACHED_KERNELS_SELECT_PQ_TABLE_TASK_H_

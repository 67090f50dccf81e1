// Dot products of 8 centroids at a time, reduced together.
#include <immintrin.h>

#include "kernels/select/pq_table_task.h"

namespace pqcached::kernels {
namespace {

constexpr uint32_t kLanes = 8;

// Returns the sum of the lanes of rows[i] in lane i.
__m256 ReduceRows(const __m256 (&rows)[kLanes]) {
  const __m256 a =
      _mm256_hadd_ps(_mm256_hadd_ps(rows[0], rows[1]), _mm256_hadd_ps(rows[2], rows[3]));
  const __m256 b =
      _mm256_hadd_ps(_mm256_hadd_ps(rows[4], rows[5]), _mm256_hadd_ps(rows[6], rows[7]));
  return _mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
}

}  // namespace

void BuildTableAvx2(const TableTask& task) {
  const uint32_t whole = task.dim / kLanes * kLanes;
  for (uint32_t c = 0; c < task.centroid_count; c += kLanes) {
    for (uint32_t head = 0; head < task.group_size; ++head) {
      const float* query = task.queries + head * task.query_stride;
      __m256 sums[kLanes];
      for (__m256& sum : sums) sum = _mm256_setzero_ps();
      for (uint32_t i = 0; i < whole; i += kLanes) {
        const __m256 q = _mm256_loadu_ps(query + i);
        const float* row = task.centroids + size_t{c} * task.dim + i;
        for (__m256& sum : sums) {
          sum = _mm256_fmadd_ps(q, _mm256_loadu_ps(row), sum);
          row += task.dim;
        }
      }
      alignas(32) float totals[kLanes];
      _mm256_store_ps(totals, ReduceRows(sums));
      for (uint32_t lane = 0; lane < kLanes; ++lane) {
        const float* row = task.centroids + size_t{c + lane} * task.dim;
        for (uint32_t i = whole; i < task.dim; ++i) totals[lane] += query[i] * row[i];
        task.tables[head * task.table_stride + c + lane] = task.scale * totals[lane];
      }
    }
  }
}

}  // namespace pqcached::kernels

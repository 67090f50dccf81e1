// Dot products of 8 centroids at a time, reduced together. Twice as many with AVX-512 would take as
// long.
#include <immintrin.h>

#include "kernels/base/simd/compress_avx2.h"
#include "kernels/select/pq_table_task.h"

namespace pqcached::kernels {
namespace {

constexpr uint32_t kLanes = 8;

// Returns the sums of the lanes of four rows, separately for the halves of the registers.
inline __m256 ReduceHalves(const __m256* rows) {
  const __m256 a =
      _mm256_add_ps(_mm256_unpacklo_ps(rows[0], rows[1]), _mm256_unpackhi_ps(rows[0], rows[1]));
  const __m256 b =
      _mm256_add_ps(_mm256_unpacklo_ps(rows[2], rows[3]), _mm256_unpackhi_ps(rows[2], rows[3]));
  const __m256d low = _mm256_unpacklo_pd(_mm256_castps_pd(a), _mm256_castps_pd(b));
  const __m256d high = _mm256_unpackhi_pd(_mm256_castps_pd(a), _mm256_castps_pd(b));
  return _mm256_add_ps(_mm256_castpd_ps(low), _mm256_castpd_ps(high));
}

// Returns the sum of the lanes of rows[i] in lane i. Horizontal additions would take longer.
__m256 ReduceRows(const __m256 (&rows)[kLanes]) {
  const __m256 a = ReduceHalves(rows);
  const __m256 b = ReduceHalves(rows + 4);
  return _mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
}

}  // namespace

void BuildTableAvx2(const TableTask& args) {
  const TableTask task = args;  // stores could change the original
  const __m256 scale = _mm256_set1_ps(task.scale);
  const uint32_t whole = task.dim / kLanes * kLanes;
  const __m256i rest = _mm256_castps_si256(FirstLanes(task.dim - whole));
  for (uint32_t c = 0; c < task.centroid_count; c += kLanes) {
    const float* const rows = task.centroids + size_t{c} * task.dim;
    for (uint32_t head = 0; head < task.group_size; ++head) {
      const float* query = task.queries + head * task.query_stride;
      __m256 sums[kLanes];
      for (__m256& sum : sums) sum = _mm256_setzero_ps();
      for (uint32_t i = 0; i < whole; i += kLanes) {
        const __m256 q = _mm256_loadu_ps(query + i);
        const float* row = rows + i;
        for (__m256& sum : sums) {
          sum = _mm256_fmadd_ps(q, _mm256_loadu_ps(row), sum);
          row += task.dim;
        }
      }
      if (whole < task.dim) {
        const __m256 q = _mm256_maskload_ps(query + whole, rest);
        const float* row = rows + whole;
        for (__m256& sum : sums) {
          sum = _mm256_fmadd_ps(q, _mm256_maskload_ps(row, rest), sum);
          row += task.dim;
        }
      }
      _mm256_storeu_ps(task.tables + head * task.table_stride + c,
                       _mm256_mul_ps(scale, ReduceRows(sums)));
    }
  }
}

}  // namespace pqcached::kernels

// k-means by matrix products of OpenBLAS, where it is installed, and a loop for the largest.
#ifndef PQCACHED_TESTS_BENCH_BLAS_PEER_H_
#define PQCACHED_TESTS_BENCH_BLAS_PEER_H_

#include <cstdint>

namespace pqcached::bench {

// Whether this build has OpenBLAS. Where it does not, BlasKMeans may not be called.
bool HasBlas();

// Moves the centroids [centroid_count, dim] `iterations` times, on the calling thread alone.
void BlasKMeans(const float* points, uint32_t point_count, uint32_t dim, uint32_t centroid_count,
                int iterations, float* centroids);

}  // namespace pqcached::bench

#endif  // PQCACHED_TESTS_BENCH_BLAS_PEER_H_

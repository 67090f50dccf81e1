#include "tests/bench/blas_peer.h"

#include <cstdlib>

#ifdef PQCACHED_BENCH_OPENBLAS

#include <cblas.h>

#include <algorithm>
#include <cstddef>
#include <vector>

namespace pqcached::bench {
namespace {

constexpr uint32_t kBlock = 2048;  // products of a block of points stay in the L2 cache

// Adds the block's points to the sums of their nearest centroids.
void AssignBlock(const float* points, uint32_t count, uint32_t dim, uint32_t centroid_count,
                 const float* products, const float* bias, float* sums, uint32_t* counts) {
  for (uint32_t i = 0; i < count; ++i) {
    const float* row = products + size_t{i} * centroid_count;
    float best = row[0] + bias[0];
    for (uint32_t c = 1; c < centroid_count; ++c) best = std::max(best, row[c] + bias[c]);
    uint32_t nearest = 0;
    while (nearest + 1 < centroid_count && row[nearest] + bias[nearest] != best) ++nearest;
    ++counts[nearest];
    const float* point = points + size_t{i} * dim;
    float* sum = sums + size_t{nearest} * dim;
    for (uint32_t d = 0; d < dim; ++d) sum[d] += point[d];
  }
}

}  // namespace

bool HasBlas() { return true; }

void BlasKMeans(const float* points, uint32_t point_count, uint32_t dim, uint32_t centroid_count,
                int iterations, float* centroids) {
  openblas_set_num_threads(1);
  std::vector<float> products(size_t{kBlock} * centroid_count);
  std::vector<float> bias(centroid_count);
  for (int iteration = 0; iteration < iterations; ++iteration) {
    std::vector<float> sums(size_t{centroid_count} * dim, 0.0f);
    std::vector<uint32_t> counts(centroid_count, 0);
    for (uint32_t c = 0; c < centroid_count; ++c) {
      float square = 0.0f;
      for (uint32_t d = 0; d < dim; ++d) square += centroids[c * dim + d] * centroids[c * dim + d];
      bias[c] = -square / 2;
    }
    for (uint32_t first = 0; first < point_count; first += kBlock) {
      const uint32_t count = std::min(kBlock, point_count - first);
      const float* block = points + size_t{first} * dim;
      cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, static_cast<int>(count),
                  static_cast<int>(centroid_count), static_cast<int>(dim), 1.0f, block,
                  static_cast<int>(dim), centroids, static_cast<int>(dim), 0.0f, products.data(),
                  static_cast<int>(centroid_count));
      AssignBlock(block, count, dim, centroid_count, products.data(), bias.data(), sums.data(),
                  counts.data());
    }
    for (uint32_t c = 0; c < centroid_count; ++c) {
      if (counts[c] == 0) continue;
      for (uint32_t d = 0; d < dim; ++d) {
        centroids[c * dim + d] = sums[c * dim + d] / static_cast<float>(counts[c]);
      }
    }
  }
}

}  // namespace pqcached::bench

#else

namespace pqcached::bench {

bool HasBlas() { return false; }
void BlasKMeans(const float*, uint32_t, uint32_t, uint32_t, int, float*) { std::abort(); }

}  // namespace pqcached::bench

#endif

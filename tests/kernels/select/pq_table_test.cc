// BuildTables: every level against double precision.
#include "kernels/select/pq_table.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

namespace pqcached::kernels {
namespace {

TEST(PqTableTest, MatchesDoublePrecisionForAllGeometries) {
  std::mt19937_64 random(1);
  std::normal_distribution<float> normal;
  for (const uint32_t key_dim : {32u, 80u, 128u, 256u}) {
    for (const uint32_t subspaces : {1u, 2u, 4u, 8u, 16u}) {
      for (uint32_t bits = 4; bits <= 8; ++bits) {
        const PqGeometry g{.key_dim = key_dim, .subspace_count = subspaces, .bits = bits};
        const uint32_t group_size = 1 + bits % 4;
        std::vector<float> queries(size_t{group_size} * key_dim);
        std::vector<float> centroids(CentroidFloats(g));
        for (float& x : queries) x = normal(random);
        for (float& x : centroids) x = normal(random);
        for (const Level level : AvailableLevels()) {
          std::vector<float> tables(group_size * TableFloats(g), NAN);
          BuildTables(Exec{level}, {.geometry = g,
                                    .group_size = group_size,
                                    .queries = queries,
                                    .scale = 0.25f,
                                    .centroids = centroids,
                                    .tables = tables});
          const uint32_t dim = SubspaceDim(g);
          for (size_t i = 0; i < tables.size(); ++i) {
            const size_t head = i / TableFloats(g);
            const size_t row = i % TableFloats(g);
            const size_t subspace = row / CentroidCount(g);
            double sum = 0.0, query_norm = 0.0, centroid_norm = 0.0;
            for (uint32_t d = 0; d < dim; ++d) {
              const double q = queries[head * key_dim + subspace * dim + d];
              const double c = centroids[row * dim + d];
              sum += q * c;
              query_norm += q * q;
              centroid_norm += c * c;
            }
            ASSERT_NEAR(tables[i], 0.25 * sum, 0.25e-5 * std::sqrt(query_norm * centroid_norm))
                << LevelName(level) << " dim " << key_dim << " m " << subspaces << " b " << bits;
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace pqcached::kernels

// PqGeometry and BuildTables: every level against double precision.
#include "kernels/select/pq_table.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

#include "tests/kernels/select/paired_geometries.h"

namespace pqcached::kernels {
namespace {

// Checks the tables of all levels against double precision. The numbers of a sub-space are found
// without DimOf, which defines the kernels.
void ExpectTables(const PqGeometry& g, uint32_t group_size, std::mt19937_64& random) {
  std::normal_distribution<float> normal;
  std::vector<float> queries(size_t{group_size} * g.key_dim);
  std::vector<float> centroids(CentroidFloats(g));
  for (float& x : queries) x = normal(random);
  for (float& x : centroids) x = normal(random);
  const uint32_t dim = SubspaceDim(g);
  for (const Level level : AvailableLevels()) {
    std::vector<float> tables(group_size * TableFloats(g), NAN);
    BuildTables(Exec{level}, {.geometry = g,
                              .group_size = group_size,
                              .queries = queries,
                              .scale = 0.25f,
                              .centroids = centroids,
                              .tables = tables});
    for (size_t i = 0; i < tables.size(); ++i) {
      const size_t head = i / TableFloats(g);
      const size_t row = i % TableFloats(g);
      const size_t subspace = row / CentroidCount(g);
      const bool paired = subspace * dim < g.paired_dims;
      double sum = 0.0, query_norm = 0.0, centroid_norm = 0.0;
      for (uint32_t d = 0; d < dim; ++d) {
        const size_t in_half = subspace * dim / 2 + d % (dim / 2);
        const size_t of_key =
            paired ? in_half + (d < dim / 2 ? 0 : g.paired_dims / 2) : subspace * dim + d;
        const double q = queries[head * g.key_dim + of_key];
        const double c = centroids[row * dim + d];
        sum += q * c;
        query_norm += q * q;
        centroid_norm += c * c;
      }
      ASSERT_NEAR(tables[i], 0.25 * sum, 0.25e-5 * std::sqrt(query_norm * centroid_norm))
          << LevelName(level) << " dim " << g.key_dim << " m " << g.subspace_count << " b "
          << g.bits << " paired " << g.paired_dims << " group " << group_size;
    }
  }
}

TEST(PqTableTest, MatchesDoublePrecisionForAllGeometries) {
  std::mt19937_64 random(1);
  for (const uint32_t key_dim : {32u, 80u, 128u, 256u}) {
    for (const uint32_t subspaces : {1u, 2u, 4u, 8u, 16u}) {
      for (uint32_t bits = 4; bits <= 8; ++bits) {
        ExpectTables({key_dim, subspaces, bits}, 1 + bits % 4, random);
      }
    }
  }
}

TEST(PqTableTest, MatchesDoublePrecisionWherePairsAreKeptTogether) {
  std::mt19937_64 random(2);
  for (const PqGeometry& geometry : PairedGeometries()) {
    for (const uint32_t group_size : {1u, 3u, 16u, 64u}) ExpectTables(geometry, group_size, random);
  }
}

TEST(PqTableTest, MatchesDoublePrecisionForRareGeometries) {
  std::mt19937_64 random(3);
  for (const PqGeometry& geometry : RareGeometries()) {
    ASSERT_TRUE(IsValid(geometry) && !HasSelect(geometry));
    for (const uint32_t group_size : {1u, 3u, 16u}) ExpectTables(geometry, group_size, random);
  }
}

TEST(PqTableTest, CutsSubspacesFromWholePairs) {
  const PqGeometry g{.key_dim = 64, .subspace_count = 4, .bits = 6};
  EXPECT_EQ(PairedDims(g, 64), 64u);
  EXPECT_EQ(PairedDims(g, 32), 32u);
  EXPECT_EQ(PairedDims(g, 16), 0u);  // one sub-space contains all pairs
  EXPECT_EQ(PairedDims(g, 0), 0u);
  EXPECT_EQ(PairedDims(g, 40), 0u);  // no multiple of a sub-space
  EXPECT_EQ(PairedDims(g, 80), 0u);  // beyond the key
  EXPECT_EQ(PairedDims({.key_dim = 64, .subspace_count = 1, .bits = 6}, 64), 0u);
  EXPECT_EQ(PairedDims({.key_dim = 36, .subspace_count = 4, .bits = 6}, 36), 0u);  // odd
  for (const PqGeometry& valid : PairedGeometries()) {
    EXPECT_TRUE(IsValid(valid)) << valid.key_dim << " paired " << valid.paired_dims;
    std::vector<bool> used(valid.key_dim);
    for (uint32_t subspace = 0; subspace < valid.subspace_count; ++subspace) {
      for (uint32_t i = 0; i < SubspaceDim(valid); ++i) used[DimOf(valid, subspace, i)] = true;
    }
    EXPECT_EQ(std::count(used.begin(), used.end(), true), valid.key_dim);
  }
  EXPECT_FALSE(IsValid({64, 4, 6, 40}));
  EXPECT_FALSE(IsValid({64, 4, 6, 16}));
}

}  // namespace
}  // namespace pqcached::kernels

// BuildTables computes, from query heads and centroids, the tables whose entries PqSelect and
// PqScore add up.
#ifndef PQCACHED_KERNELS_SELECT_PQ_TABLE_H_
#define PQCACHED_KERNELS_SELECT_PQ_TABLE_H_

#include <cstdint>
#include <span>

#include "kernels/base/exec.h"
#include "kernels/select/pq.h"

namespace pqcached::kernels {

struct BuildTablesArgs {
  PqGeometry geometry;
  uint32_t group_size = 0;         // query heads of this kv head, G
  std::span<const float> queries;  // [G, key_dim]
  float scale = 1.0f;              // softmax scale, applied here
  std::span<const float>
      centroids;            // [subspace_count, 2^bits, key_dim / subspace_count], one codebook
  std::span<float> tables;  // [G, subspace_count, 2^bits], overwritten
};

// Sets tables[g, j, c] = scale * (sub-space j of query g) . centroids[j, c].
//
// REQUIRES: IsValid(geometry); the spans have exactly the shapes above and do not overlap.
// Instruction sets round differently: by at most 1e-5 * |scale| * |query sub-space| * |centroid|.
void BuildTables(const Exec& exec, const BuildTablesArgs& args);

}  // namespace pqcached::kernels

#endif  // PQCACHED_KERNELS_SELECT_PQ_TABLE_H_

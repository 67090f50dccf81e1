#include "kernels/pq_table.h"

#include "kernels/check.h"

namespace pqcached::kernels {
namespace {

// The specification.
void BuildTablesReference(const BuildTablesArgs& args) {
  const uint32_t dim = SubspaceDim(args.geometry);
  const uint32_t centroid_count = CentroidCount(args.geometry);
  float* out = args.tables.data();
  for (uint32_t head = 0; head < args.group_size; ++head) {
    const float* query = args.queries.data() + size_t{head} * args.geometry.key_dim;
    const float* centroid = args.centroids.data();
    for (uint32_t subspace = 0; subspace < args.geometry.subspace_count; ++subspace) {
      for (uint32_t code = 0; code < centroid_count; ++code) {
        float sum = 0.0f;
        for (uint32_t i = 0; i < dim; ++i) sum += query[i] * centroid[i];
        *out++ = args.scale * sum;
        centroid += dim;
      }
      query += dim;
    }
  }
}

}  // namespace

void BuildTables(const Exec& exec, const BuildTablesArgs& args) {
  PQC_CHECK(IsValid(args.geometry));
  PQC_CHECK(args.queries.size() == size_t{args.group_size} * args.geometry.key_dim);
  PQC_CHECK(args.centroids.size() == CentroidFloats(args.geometry));
  PQC_CHECK(args.tables.size() == args.group_size * TableFloats(args.geometry));
  (void)exec;
  BuildTablesReference(args);
}

}  // namespace pqcached::kernels

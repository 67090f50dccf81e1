#include "kernels/select/pq_table.h"

#include "kernels/base/check.h"
#include "kernels/select/pq_table_task.h"

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

// Number of independent sums, needed because the compiler may not change the order of float
// additions.
constexpr uint32_t kLanes = 8;

float Dot(const float* a, const float* b, uint32_t dim) {
  float lanes[kLanes] = {};
  uint32_t i = 0;
  for (; i + kLanes <= dim; i += kLanes) {
    for (uint32_t j = 0; j < kLanes; ++j) lanes[j] += a[i + j] * b[i + j];
  }
  for (uint32_t j = 0; i + j < dim; ++j) lanes[j] += a[i + j] * b[i + j];
  float sum = 0.0f;
  for (const float lane : lanes) sum += lane;
  return sum;
}

void BuildTable(const Exec& exec, const TableTask& task) {
#if defined(PQCACHED_X86)
  if (exec.level >= Level::kAvx512) return BuildTableAvx512(task);
  if (exec.level >= Level::kAvx2) return BuildTableAvx2(task);
#endif
  (void)exec;
  BuildTablePortable(task);
}

}  // namespace

void BuildTablePortable(const TableTask& task) {
  for (uint32_t head = 0; head < task.group_size; ++head) {
    const float* query = task.queries + head * task.query_stride;
    float* out = task.tables + head * task.table_stride;
    for (uint32_t c = 0; c < task.centroid_count; ++c) {
      out[c] = task.scale * Dot(query, task.centroids + size_t{c} * task.dim, task.dim);
    }
  }
}

void BuildTables(const Exec& exec, const BuildTablesArgs& args) {
  PQC_CHECK(IsValid(args.geometry));
  PQC_CHECK(args.queries.size() == size_t{args.group_size} * args.geometry.key_dim);
  PQC_CHECK(args.centroids.size() == CentroidFloats(args.geometry));
  PQC_CHECK(args.tables.size() == args.group_size * TableFloats(args.geometry));
  if (exec.level == Level::kReference) return BuildTablesReference(args);
  const PqGeometry& g = args.geometry;
  const uint32_t dim = SubspaceDim(g);
  for (uint32_t subspace = 0; subspace < g.subspace_count; ++subspace) {
    BuildTable(exec, {.group_size = args.group_size,
                      .queries = args.queries.data() + subspace * dim,
                      .query_stride = g.key_dim,
                      .scale = args.scale,
                      .centroids = args.centroids.data() + (size_t{subspace} * dim << g.bits),
                      .centroid_count = CentroidCount(g),
                      .dim = dim,
                      .tables = args.tables.data() + (size_t{subspace} << g.bits),
                      .table_stride = TableFloats(g)});
  }
}

}  // namespace pqcached::kernels

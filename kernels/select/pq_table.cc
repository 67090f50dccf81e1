#include "kernels/select/pq_table.h"

#include <algorithm>

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
        for (uint32_t i = 0; i < dim; ++i) {
          sum += query[DimOf(args.geometry, subspace, i)] * centroid[i];
        }
        *out++ = args.scale * sum;
        centroid += dim;
      }
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
  constexpr uint32_t kCentroidsAtOnce = 16;
  const bool wide = task.centroid_count % kCentroidsAtOnce == 0;
  if (wide && exec.level >= Level::kAvx2) return BuildTableAvx2(task);
#endif
  (void)exec;
  BuildTablePortable(task);
}

// Numbers of queries that are copied at a time: all heads of a group, except for the largest ones.
constexpr uint32_t kCopiedNumbers = 2048;

// Builds the table of a sub-space that keeps pairs together. `task.queries` are those of the first
// half. The copies make queries as contiguous as centroids are.
void BuildPairedTable(const Exec& exec, const TableTask& task, uint32_t pair_offset) {
  PQC_CHECK(task.dim <= kCopiedNumbers);
  alignas(64) float copies[kCopiedNumbers];
  const uint32_t half = task.dim / 2;
  const uint32_t heads_at_once = kCopiedNumbers / task.dim;
  for (uint32_t first = 0; first < task.group_size; first += heads_at_once) {
    TableTask part = task;
    part.group_size = std::min(heads_at_once, task.group_size - first);
    part.queries = copies;
    part.query_stride = task.dim;
    part.tables = task.tables + first * task.table_stride;
    for (uint32_t head = 0; head < part.group_size; ++head) {
      const float* const query = task.queries + (first + head) * task.query_stride;
      float* const copy = copies + size_t{head} * task.dim;
      std::copy_n(query, half, copy);
      std::copy_n(query + pair_offset, half, copy + half);
    }
    BuildTable(exec, part);
  }
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
    const TableTask task{.group_size = args.group_size,
                         .queries = args.queries.data() + DimOf(g, subspace, 0),
                         .query_stride = g.key_dim,
                         .scale = args.scale,
                         .centroids = args.centroids.data() + (size_t{subspace} * dim << g.bits),
                         .centroid_count = CentroidCount(g),
                         .dim = dim,
                         .tables = args.tables.data() + (size_t{subspace} << g.bits),
                         .table_stride = TableFloats(g)};
    const uint32_t pair_offset = PairOffset(g, subspace);
    if (pair_offset == 0) {
      BuildTable(exec, task);
    } else {
      BuildPairedTable(exec, task, pair_offset);
    }
  }
}

}  // namespace pqcached::kernels

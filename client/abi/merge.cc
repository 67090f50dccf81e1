// Implements pqc_merge.
#include <cstddef>

#include "client/base/error.h"
#include "kernels/attend/merge.h"
#include "pqcached/client.h"

namespace pqcached::client {
namespace {

pqc_status Merge(uint32_t rows, uint32_t dim, float* output_a, float* lse_a, const float* output_b,
                 const float* lse_b) {
  if (rows == 0) return PQC_OK;
  if (dim > 0 && !output_a) return Fail(PQC_INVALID_ARGUMENT, "output_a", "must not be NULL");
  if (!lse_a) return Fail(PQC_INVALID_ARGUMENT, "lse_a", "must not be NULL");
  if (dim > 0 && !output_b) return Fail(PQC_INVALID_ARGUMENT, "output_b", "must not be NULL");
  if (!lse_b) return Fail(PQC_INVALID_ARGUMENT, "lse_b", "must not be NULL");
  const kernels::Partial partials[] = {{output_a, lse_a}, {output_b, lse_b}};
  kernels::MergePartials(kernels::Exec{}, {.query_count = rows,
                                           .value_dim = dim,
                                           .partials = partials,
                                           .output = {output_a, size_t{rows} * dim},
                                           .lse = {lse_a, rows}});
  return PQC_OK;
}

}  // namespace
}  // namespace pqcached::client

extern "C" pqc_status pqc_merge(uint32_t rows, uint32_t dim, float* output_a, float* lse_a,
                                const float* output_b, const float* lse_b) {
  return pqcached::client::Call(
      [&] { return pqcached::client::Merge(rows, dim, output_a, lse_a, output_b, lse_b); });
}

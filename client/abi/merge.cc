// Implements pqc_merge and pqc_merge_tensors.
#include <cstddef>
#include <limits>
#include <vector>

#include "client/base/arguments.h"
#include "client/base/error.h"
#include "client/base/partials.h"
#include "kernels/attend/merge.h"
#include "kernels/base/status_macros.h"
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

// A caller's partial attention in this process: to read, and the same memory to write.
struct HostPartial {
  explicit HostPartial(const PartialView& from);

  float Lse(uint64_t token, uint32_t head) const {
    const std::byte* at = place.lse + static_cast<ptrdiff_t>(token) * place.lse_strides_bytes[0] +
                          static_cast<ptrdiff_t>(head) * place.lse_strides_bytes[1];
    return kvstore::FromBase(place.lse_base, kernels::LoadElement(place.lse_dtype, at, 0));
  }

  kvstore::LayerQuery output;  // copies rows as floats
  kvstore::AttentionOut place;
};

HostPartial::HostPartial(const PartialView& from) {
  output.data = from.output.data;
  output.dtype = place.output_dtype = from.output.dtype;
  place.output = const_cast<std::byte*>(from.output.data);
  place.lse = const_cast<std::byte*>(from.lse.data);
  place.lse_dtype = from.lse.dtype;
  place.lse_base = from.lse_base;
  for (uint32_t dim = 0; dim < 3; ++dim) {
    output.strides_bytes[dim] = place.output_strides_bytes[dim] = StrideBytes(from.output, dim);
  }
  for (uint32_t dim = 0; dim < 2; ++dim) {
    place.lse_strides_bytes[dim] = StrideBytes(from.lse, dim);
  }
}

float SinkLogit(const PartialView& partial, uint32_t head) {
  if (!partial.has_sinks) return -std::numeric_limits<float>::infinity();
  const std::byte* at =
      partial.sinks.data + static_cast<ptrdiff_t>(head) * StrideBytes(partial.sinks, 0);
  return kernels::LoadElement(partial.sinks.dtype, at, 0);
}

pqc_status MergeTensors(const pqc_partial* caller_a, const pqc_partial* caller_b) {
  PartialView view_a, view_b;
  RETURN_IF_ERROR(ReadPartials(caller_a, caller_b, kOnHost, &view_a, &view_b));
  const HostPartial a(view_a), b(view_b);
  const uint32_t dim = view_a.dim();
  std::vector<float> output_a(dim), output_b(dim);
  const std::vector<float> no_value(dim);
  for (uint32_t token = 0; token < view_a.tokens(); ++token) {
    for (uint32_t head = 0; head < view_a.heads(); ++head) {
      float lse_a = a.Lse(token, head);
      const float lse_b = b.Lse(token, head);
      a.output.Copy(token, head, dim, output_a.data());
      b.output.Copy(token, head, dim, output_b.data());
      const float sink = SinkLogit(view_a, head);
      const kernels::Partial partials[] = {
          {output_a.data(), &lse_a}, {output_b.data(), &lse_b}, {no_value.data(), &sink}};
      kernels::MergePartials(kernels::Exec{}, {.query_count = 1,
                                               .value_dim = dim,
                                               .partials = partials,
                                               .output = output_a,
                                               .lse = {&lse_a, 1}});
      a.place.Store(token, head, output_a.data(), dim, lse_a);
    }
  }
  return PQC_OK;
}

}  // namespace
}  // namespace pqcached::client

extern "C" pqc_status pqc_merge_tensors(const pqc_partial* a, const pqc_partial* b) {
  return pqcached::client::Call([&] { return pqcached::client::MergeTensors(a, b); });
}

extern "C" pqc_status pqc_merge(uint32_t rows, uint32_t dim, float* output_a, float* lse_a,
                                const float* output_b, const float* lse_b) {
  return pqcached::client::Call(
      [&] { return pqcached::client::Merge(rows, dim, output_a, lse_a, output_b, lse_b); });
}

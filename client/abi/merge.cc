// Implements pqc_merge and pqc_merge_tensors.
#include <cstddef>
#include <limits>
#include <string>
#include <vector>

#include "client/base/arguments.h"
#include "client/base/error.h"
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

// A caller's partial attention: [tokens, heads, dim] to read, and the same memory to write.
struct PartialView {
  static constexpr float kNoSink = -std::numeric_limits<float>::infinity();

  uint64_t tokens = 0;
  uint32_t heads = 0;
  uint32_t dim = 0;
  kvstore::LayerQuery output;  // copies rows as floats
  kvstore::AttentionOut place;
  bool has_sinks = false;
  TensorView sinks;  // [heads]

  float Lse(uint64_t token, uint32_t head) const {
    const std::byte* at = place.lse + static_cast<ptrdiff_t>(token) * place.lse_strides_bytes[0] +
                          static_cast<ptrdiff_t>(head) * place.lse_strides_bytes[1];
    return kvstore::FromBase(place.lse_base, kernels::LoadElement(place.lse_dtype, at, 0));
  }
  float SinkLogit(uint32_t head) const {
    if (!has_sinks) return kNoSink;
    const std::byte* at = sinks.data + static_cast<ptrdiff_t>(head) * StrideBytes(sinks, 0);
    return kernels::LoadElement(sinks.dtype, at, 0);
  }
};

pqc_status ReadSinks(const pqc_partial& partial, const char* name, PartialView* view) {
  if (!partial.sink_logits) return PQC_OK;
  RETURN_IF_ERROR(ReadTensor(*partial.sink_logits, name, &view->sinks));
  if (view->sinks.ndim != 1 || view->sinks.shape[0] != view->heads) {
    return Fail(PQC_INVALID_ARGUMENT, FieldPath::Of("%s.shape", name), "must be [heads] = [%u]",
                view->heads);
  }
  view->has_sinks = true;
  return PQC_OK;
}

// Reads a partial; `name` is "a" or "b".
pqc_status ReadPartial(const pqc_partial* from, const char* name, PartialView* view) {
  constexpr uint64_t kMaxSize = kMaxSequenceTokens;
  pqc_partial partial;
  RETURN_IF_ERROR(ReadStruct(from, name, &partial));
  const std::string path(name);
  const std::string output_name = path + ".output", lse_name = path + ".lse";
  RETURN_IF_ERROR(
      ReadLogBase(RawEnum(partial.lse_base), (path + ".lse_base").c_str(), &view->place.lse_base));
  TensorView output;
  RETURN_IF_ERROR(ReadTensor(partial.output, output_name.c_str(), &output));
  if (output.ndim != 3) {
    return Fail(PQC_INVALID_ARGUMENT, FieldPath::Of("%s.ndim", output_name.c_str()),
                "%u, must be 3: [tokens, heads, dim]", output.ndim);
  }
  for (uint32_t dim = 0; dim < 3; ++dim) {
    if (output.shape[dim] <= kMaxSize) continue;
    return Fail(PQC_INVALID_ARGUMENT, FieldPath::Of("%s.shape[%u]", output_name.c_str(), dim),
                "more than 2^30");
  }
  RETURN_IF_ERROR(ReadTarget(partial.output, output_name.c_str(),
                             {output.shape[0], output.shape[1], output.shape[2]}, &output));
  TensorView lse;
  RETURN_IF_ERROR(
      ReadTarget(partial.lse, lse_name.c_str(), {output.shape[0], output.shape[1]}, &lse));
  view->tokens = output.shape[0];
  view->heads = static_cast<uint32_t>(output.shape[1]);
  view->dim = static_cast<uint32_t>(output.shape[2]);
  view->output.data = output.data;
  view->output.dtype = view->place.output_dtype = output.dtype;
  view->place.output = const_cast<std::byte*>(output.data);
  view->place.lse = const_cast<std::byte*>(lse.data);
  view->place.lse_dtype = lse.dtype;
  for (uint32_t dim = 0; dim < 3; ++dim) {
    const ptrdiff_t stride = StrideBytes(output, dim);
    view->output.strides_bytes[dim] = view->place.output_strides_bytes[dim] = stride;
  }
  for (uint32_t dim = 0; dim < 2; ++dim) view->place.lse_strides_bytes[dim] = StrideBytes(lse, dim);
  return ReadSinks(partial, (path + ".sink_logits").c_str(), view);
}

pqc_status MergeTensors(const pqc_partial* caller_a, const pqc_partial* caller_b) {
  PartialView a, b;
  RETURN_IF_ERROR(ReadPartial(caller_a, "a", &a));
  RETURN_IF_ERROR(ReadPartial(caller_b, "b", &b));
  if (a.tokens != b.tokens || a.heads != b.heads || a.dim != b.dim) {
    return Fail(PQC_INVALID_ARGUMENT, "b.output.shape", "must be that of a.output");
  }
  if (b.has_sinks) {
    return Fail(PQC_INVALID_ARGUMENT, "b.sink_logits", "must be NULL: sinks are a field of a");
  }
  std::vector<float> output_a(a.dim), output_b(a.dim);
  const std::vector<float> no_value(a.dim);
  for (uint64_t token = 0; token < a.tokens; ++token) {
    for (uint32_t head = 0; head < a.heads; ++head) {
      float lse_a = a.Lse(token, head);
      const float lse_b = b.Lse(token, head);
      a.output.Copy(static_cast<uint32_t>(token), head, a.dim, output_a.data());
      b.output.Copy(static_cast<uint32_t>(token), head, a.dim, output_b.data());
      const float sink = a.SinkLogit(head);
      const kernels::Partial partials[] = {
          {output_a.data(), &lse_a}, {output_b.data(), &lse_b}, {no_value.data(), &sink}};
      kernels::MergePartials(kernels::Exec{}, {.query_count = 1,
                                               .value_dim = a.dim,
                                               .partials = partials,
                                               .output = output_a,
                                               .lse = {&lse_a, 1}});
      a.place.Store(token, head, output_a.data(), a.dim, lse_a);
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

#include "client/base/partials.h"

#include <string>

#include "client/base/error.h"
#include "kernels/base/status_macros.h"

namespace pqcached::client {
namespace {

pqc_status ReadSinks(const pqc_partial& partial, const char* name, const TensorPlace& place,
                     PartialView* view) {
  if (!partial.sink_logits) return PQC_OK;
  RETURN_IF_ERROR(ReadTensor(*partial.sink_logits, name, &view->sinks, place));
  if (view->sinks.ndim != 1 || view->sinks.shape[0] != view->heads()) {
    return Fail(PQC_INVALID_ARGUMENT, FieldPath::Of("%s.shape", name), "must be [heads] = [%u]",
                view->heads());
  }
  view->has_sinks = true;
  return PQC_OK;
}

// Reads a partial; `name` is "a" or "b".
pqc_status ReadPartial(const pqc_partial* from, const char* name, const TensorPlace& place,
                       PartialView* view) {
  constexpr uint64_t kMaxSize = kMaxSequenceTokens;
  pqc_partial partial;
  RETURN_IF_ERROR(ReadStruct(from, name, &partial));
  const std::string path(name);
  const std::string output_name = path + ".output", lse_name = path + ".lse";
  RETURN_IF_ERROR(
      ReadLogBase(RawEnum(partial.lse_base), (path + ".lse_base").c_str(), &view->lse_base));
  TensorView& output = view->output;
  RETURN_IF_ERROR(ReadTensor(partial.output, output_name.c_str(), &output, place));
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
                             {output.shape[0], output.shape[1], output.shape[2]}, &output, place));
  RETURN_IF_ERROR(ReadTarget(partial.lse, lse_name.c_str(), {output.shape[0], output.shape[1]},
                             &view->lse, place));
  return ReadSinks(partial, (path + ".sink_logits").c_str(), place, view);
}

}  // namespace

pqc_status ReadPartials(const pqc_partial* from_a, const pqc_partial* from_b,
                        const TensorPlace& place, PartialView* a, PartialView* b) {
  RETURN_IF_ERROR(ReadPartial(from_a, "a", place, a));
  RETURN_IF_ERROR(ReadPartial(from_b, "b", place, b));
  if (a->tokens() != b->tokens() || a->heads() != b->heads() || a->dim() != b->dim()) {
    return Fail(PQC_INVALID_ARGUMENT, "b.output.shape", "must be that of a.output");
  }
  if (b->has_sinks) {
    return Fail(PQC_INVALID_ARGUMENT, "b.sink_logits", "must be NULL: sinks are a field of a");
  }
  return PQC_OK;
}

}  // namespace pqcached::client

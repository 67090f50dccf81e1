// Merges partial attentions on a GPU.
#include "client/base/arguments.h"
#include "client/base/error.h"
#include "client/base/partials.h"
#include "client/gpu/gpu.h"
#include "kernels/base/status_macros.h"

namespace pqcached::client {
namespace {

// A device loads and stores whole elements.
pqc_status CheckAligned(const TensorView& view, const char* name) {
  if (reinterpret_cast<uintptr_t>(view.data) % kernels::DTypeBytes(view.dtype) == 0) return PQC_OK;
  return Fail(PQC_INVALID_ARGUMENT, FieldPath::Of("%s.ptr", name),
              "must be aligned to the %zu bytes of its elements on a GPU",
              kernels::DTypeBytes(view.dtype));
}

// Without elements, a tensor may have any pointer.
kernels::cuda::PartialTensors TensorsOf(const PartialView& view) {
  std::byte* const output = view.dim() > 0 ? const_cast<std::byte*>(view.output.data) : nullptr;
  kernels::cuda::PartialTensors tensors{.output = output,
                                        .lse = const_cast<std::byte*>(view.lse.data),
                                        .output_dtype = view.output.dtype,
                                        .lse_dtype = view.lse.dtype,
                                        .lse_is_base2 = view.lse_base == kvstore::LogBase::kTwo};
  for (uint32_t dim = 0; dim < 3; ++dim) tensors.output_strides[dim] = view.output.strides[dim];
  for (uint32_t dim = 0; dim < 2; ++dim) tensors.lse_strides[dim] = view.lse.strides[dim];
  return tensors;
}

}  // namespace

pqc_status MergeOnGpu(pqc_gpu* gpu, const pqc_partial* caller_a, const pqc_partial* caller_b,
                      void* stream) {
  if (!gpu) return Fail(PQC_INVALID_ARGUMENT, "gpu", "must not be NULL");
  PartialView a, b;
  RETURN_IF_ERROR(ReadPartials(caller_a, caller_b, {PQC_CUDA, stream}, &a, &b));
  RETURN_IF_ERROR(CheckAligned(a.output, "a.output"));
  RETURN_IF_ERROR(CheckAligned(a.lse, "a.lse"));
  RETURN_IF_ERROR(CheckAligned(b.output, "b.output"));
  RETURN_IF_ERROR(CheckAligned(b.lse, "b.lse"));
  RETURN_IF_ERROR(CheckAligned(a.sinks, "a.sink_logits"));
  const char* field = "gpu";
  const gpu::Outcome launched = gpu->state->steps->Merge({.token_count = a.tokens(),
                                                          .head_count = a.heads(),
                                                          .dim = a.dim(),
                                                          .a = TensorsOf(a),
                                                          .b = TensorsOf(b),
                                                          .sink_logits = a.sinks.data,
                                                          .sink_dtype = a.sinks.dtype,
                                                          .sink_stride = a.sinks.strides[0]},
                                                         stream, &field);
  return Report(launched, field);
}

}  // namespace pqcached::client

// The example of gpu.hpp, compiled. It is not run, because it needs a sidecar and a GPU.
#include "pqcached/gpu.hpp"

#include <span>

// query, rows: host descriptions of device memory; output, lse: device memory.
pqcached::Status GpuHppExample(const pqcached::Cache& cache, const pqcached::StepItem& item,
                               const pqcached::Tensor& query, const pqcached::LayerRows& rows,
                               std::span<float> output, std::span<float> lse, void* stream);

// clang-format off
pqcached::Status GpuHppExample(const pqcached::Cache& cache, const pqcached::StepItem& item,
                               const pqcached::Tensor& query, const pqcached::LayerRows& rows,
                               std::span<float> output, std::span<float> lse, void* stream) {
  // [example]
  auto gpu = pqcached::Gpu::Open(cache, {.token_capacity = 131072});
  if (!gpu.ok()) return gpu.status();  // no device: Client::BeginStep and host memory
  const pqcached::Selection selection{.sink_tokens = 16, .window_tokens = 64, .ratio = 0.1};
  auto step = gpu->BeginStep({&item, 1}, selection, stream);
  if (!step.ok()) return step.status();
  pqcached::Status status = step->Attend(0, query.OnGpu(), output, lse);  // per layer
  if (status.ok()) status = step->End({&rows, 1});  // a step that has failed is abandoned
  // [/example]
  return status;
}

// Defines the only exported symbol of libpqcached_gpu.
#include <memory>
#include <new>

#include "gpu/device_steps.h"
#include "gpu/load/device_loader.h"
#include "gpu/steps.h"
#include "kernels/base/status_macros.h"

namespace pqcached::gpu {
namespace {

// Opens steps and catches exceptions, which must not cross the library boundary.
Outcome OpenSteps(const StepsOptions& options, Steps** steps) {
  try {
    std::unique_ptr<DeviceSteps> opened;
    RETURN_IF_ERROR(DeviceSteps::Open(options, opened));
    *steps = opened.release();
    return {};
  } catch (const std::bad_alloc&) {
    return Status{Code::kOutOfMemory, "out of host memory"};
  }
}

Outcome OpenLoader(const void* target, RowLoader** loader) {
  try {
    std::unique_ptr<DeviceLoader> opened;
    RETURN_IF_ERROR(DeviceLoader::Open(target, opened));
    *loader = opened.release();
    return {};
  } catch (const std::bad_alloc&) {
    return Status{Code::kOutOfMemory, "out of host memory"};
  }
}

}  // namespace
}  // namespace pqcached::gpu

extern "C" __attribute__((visibility("default"))) const pqcached::gpu::GpuEntry*
pqcached_gpu_entry() {
  static constexpr pqcached::gpu::GpuEntry kEntry = {.steps_version = pqcached::gpu::kStepsVersion,
                                                     .open = &pqcached::gpu::OpenSteps,
                                                     .open_loader = &pqcached::gpu::OpenLoader};
  return &kEntry;
}

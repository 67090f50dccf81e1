#include "gpu/status.h"

#include <cuda_runtime.h>

namespace pqcached::gpu {
namespace {

Code CodeOf(cudaError_t error) {
  switch (error) {
    case cudaErrorNoDevice:
    case cudaErrorInsufficientDriver:
    case cudaErrorInitializationError:
      return Code::kNoDevice;
    case cudaErrorNotSupported:
    case cudaErrorNoKernelImageForDevice:
      return Code::kUnsupported;
    case cudaErrorInvalidValue:
    case cudaErrorInvalidDevice:
    case cudaErrorInvalidResourceHandle:
    case cudaErrorInvalidConfiguration:
      return Code::kInvalid;
    case cudaErrorMemoryAllocation:
      return Code::kOutOfMemory;
    default:
      return Code::kFailed;
  }
}

}  // namespace

Status OutOfRange(const char* field, uint64_t value, const std::string& range) {
  return {Code::kInvalid,
          std::string(field) + " is " + std::to_string(value) + ", must be " + range};
}

Status FromCuda(int cuda_error, std::string_view what) {
  const auto error = static_cast<cudaError_t>(cuda_error);
  if (error == cudaSuccess) return {};
  std::string message(what);
  message += ": ";
  message += cudaGetErrorName(error);
  message += ", ";
  message += cudaGetErrorString(error);
  return {CodeOf(error), std::move(message)};
}

}  // namespace pqcached::gpu

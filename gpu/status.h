// Status is the result of calls of gpu/: a code and a human-readable message.
//
// A value; thread-compatible.
#ifndef PQCACHED_GPU_STATUS_H_
#define PQCACHED_GPU_STATUS_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>

#include "kernels/cuda/status.h"

namespace pqcached::gpu {

enum class Code : uint8_t {
  kOk,
  kNoDevice,     // no GPU, no driver, or a driver older than the runtime: compute on the CPU
  kUnsupported,  // the device cannot do it: another architecture, no read-only page-locking
  kInvalid,      // an argument is out of range: the message names it and the limit
  kOutOfMemory,  // no device memory, or page-locking refused: the message gives the bytes wanted
  kFailed,       // anything else that the runtime reports
};

class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(Code code, std::string message) : code_(code), message_(std::move(message)) {}

  bool ok() const { return code_ == Code::kOk; }
  Code code() const { return code_; }
  const std::string& message() const { return message_; }

 private:
  Code code_ = Code::kOk;
  std::string message_;
};

// Returns kInvalid: "FIELD is VALUE, must be RANGE".
Status OutOfRange(const char* field, uint64_t value, const std::string& range);

// Converts a cudaError_t to a Status. `what` names the failed operation ("page-locking 64 MiB at
// ...").
Status FromCuda(int cuda_error, std::string_view what);

inline Status FromKernel(kernels::cuda::KernelStatus status, std::string_view what) {
  return FromCuda(status.cuda_error, what);
}

}  // namespace pqcached::gpu

#endif  // PQCACHED_GPU_STATUS_H_

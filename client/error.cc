#include "client/error.h"

#include <cstdarg>
#include <cstdio>

namespace pqcached::client {
namespace {
thread_local char last_error[1024] = "";
}  // namespace

pqc_status Fail(pqc_status status, const char* format, ...) noexcept {
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(last_error, sizeof(last_error), format, arguments);
  va_end(arguments);
  return status;
}

void ClearLastError() noexcept { last_error[0] = '\0'; }

}  // namespace pqcached::client

extern "C" {

uint32_t pqc_abi_version(void) { return PQC_ABI_VERSION; }

const char* pqc_last_error(void) { return pqcached::client::last_error; }

const char* pqc_status_name(pqc_status status) {
  switch (static_cast<int>(status)) {
    case PQC_OK:
      return "OK";
    case PQC_CANCELLED:
      return "CANCELLED";
    case PQC_UNKNOWN:
      return "UNKNOWN";
    case PQC_INVALID_ARGUMENT:
      return "INVALID_ARGUMENT";
    case PQC_DEADLINE_EXCEEDED:
      return "DEADLINE_EXCEEDED";
    case PQC_NOT_FOUND:
      return "NOT_FOUND";
    case PQC_ALREADY_EXISTS:
      return "ALREADY_EXISTS";
    case PQC_PERMISSION_DENIED:
      return "PERMISSION_DENIED";
    case PQC_RESOURCE_EXHAUSTED:
      return "RESOURCE_EXHAUSTED";
    case PQC_FAILED_PRECONDITION:
      return "FAILED_PRECONDITION";
    case PQC_ABORTED:
      return "ABORTED";
    case PQC_OUT_OF_RANGE:
      return "OUT_OF_RANGE";
    case PQC_UNIMPLEMENTED:
      return "UNIMPLEMENTED";
    case PQC_INTERNAL:
      return "INTERNAL";
    case PQC_UNAVAILABLE:
      return "UNAVAILABLE";
    case PQC_DATA_LOSS:
      return "DATA_LOSS";
    case PQC_UNAUTHENTICATED:
      return "UNAUTHENTICATED";
    default:
      return "UNKNOWN_STATUS";
  }
}

}  // extern "C"

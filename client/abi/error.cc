// Implements the calls about the last error, statuses and the version.
#include "client/base/error.h"

extern "C" {

uint32_t pqc_abi_version(void) { return PQC_ABI_VERSION; }

const char* pqc_last_error(void) { return pqcached::client::LastMessage(); }

const char* pqc_last_error_field(void) { return pqcached::client::LastRefusal().field; }

uint32_t pqc_last_error_retry_ms(void) { return pqcached::client::LastRefusal().retry_ms; }

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

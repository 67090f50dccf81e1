#include "client/engines/llama/application/last_error.h"

#include "client/engines/llama/application/pqcached_llama.h"

namespace pqcached::llama {
namespace {

thread_local std::string last_error;

}  // namespace

pqc_status SetLastError(pqc_status status, const std::string& message) noexcept {
  try {
    last_error = status == PQC_OK ? "" : message;
  } catch (const std::bad_alloc&) {
    last_error.clear();
  }
  return status;
}

}  // namespace pqcached::llama

const char* pqc_llama_last_error(void) { return pqcached::llama::last_error.c_str(); }

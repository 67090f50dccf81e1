// The calling thread's last failure: pqc_llama_last_error.
#ifndef PQCACHED_CLIENT_ENGINES_LLAMA_APPLICATION_LAST_ERROR_H_
#define PQCACHED_CLIENT_ENGINES_LLAMA_APPLICATION_LAST_ERROR_H_

#include <exception>
#include <new>
#include <string>

#include "pqcached/status.h"

namespace pqcached::llama {

// Sets the message, "" on PQC_OK, and returns the status.
pqc_status SetLastError(pqc_status status, const std::string& message) noexcept;

// Returns what `call` returns; an exception becomes a status.
template <class Call>
pqc_status WithoutExceptions(const Call& call) noexcept {
  try {
    return call();
  } catch (const std::bad_alloc&) {
    return SetLastError(PQC_RESOURCE_EXHAUSTED, "this process is out of memory");
  } catch (const std::exception& error) {
    return SetLastError(PQC_INTERNAL, error.what());
  }
}

}  // namespace pqcached::llama

#endif  // PQCACHED_CLIENT_ENGINES_LLAMA_APPLICATION_LAST_ERROR_H_

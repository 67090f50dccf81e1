// The calling thread's last error, and the frame that every call of the C ABI runs in. Thread-safe.
#ifndef PQCACHED_CLIENT_ERROR_H_
#define PQCACHED_CLIENT_ERROR_H_

#include <exception>
#include <new>

#include "client/deadline.h"
#include "pqcached/client.h"

namespace pqcached::client {

// Stores the reason why the thread's call failed, and returns `status`. Allocates nothing;
// truncates the text to 1023 bytes.
[[gnu::format(printf, 2, 3)]] pqc_status Fail(pqc_status status, const char* format, ...) noexcept;
void ClearLastError() noexcept;

// Runs the body of one call and converts exceptions to statuses.
template <class Body>
pqc_status Call(const Body& body) noexcept {
  ClearLastError();
  const CallFrame frame;
  try {
    return body();
  } catch (const std::bad_alloc&) {
    return Fail(PQC_RESOURCE_EXHAUSTED, "the client is out of memory");
  } catch (const std::exception& error) {
    return Fail(PQC_INTERNAL, "%s", error.what());
  }
}

}  // namespace pqcached::client

#endif  // PQCACHED_CLIENT_ERROR_H_

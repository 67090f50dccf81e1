// Guarded is the one place where exceptions end: a failed call must not end the daemon.
#ifndef PQCACHED_SERVICE_BASE_GUARDED_H_
#define PQCACHED_SERVICE_BASE_GUARDED_H_

#include <functional>

#include "absl/status/status.h"

namespace pqcached::service {

// Runs `work` and turns its exceptions into a status.
//
// Errors: those of `work`; kResourceExhausted (out of memory), kInternal (any other exception)
absl::Status Guarded(const std::function<absl::Status()>& work);

}  // namespace pqcached::service

#endif  // PQCACHED_SERVICE_BASE_GUARDED_H_

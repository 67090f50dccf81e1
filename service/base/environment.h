// Environment reads variables of a process's environment; tests pass a function of their own.
#ifndef PQCACHED_SERVICE_BASE_ENVIRONMENT_H_
#define PQCACHED_SERVICE_BASE_ENVIRONMENT_H_

#include <functional>

namespace pqcached::service {

// Returns nullptr when the variable is not set.
using Environment = std::function<const char*(const char* name)>;

// Returns the environment of this process. The function is thread-safe as long as no thread changes
// the environment.
Environment ProcessEnvironment();

}  // namespace pqcached::service

#endif  // PQCACHED_SERVICE_BASE_ENVIRONMENT_H_

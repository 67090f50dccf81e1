#include "service/base/environment.h"

#include <cstdlib>

namespace pqcached::service {

Environment ProcessEnvironment() {
  return [](const char* name) -> const char* { return std::getenv(name); };
}

}  // namespace pqcached::service

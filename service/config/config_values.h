// What the sources of the configuration share: the form of a socket's address, and refusals of a
// value (config.h).
#ifndef PQCACHED_SERVICE_CONFIG_CONFIG_VALUES_H_
#define PQCACHED_SERVICE_CONFIG_CONFIG_VALUES_H_

#include <cstddef>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "service/base/refusal.h"

namespace pqcached::service {

inline constexpr absl::string_view kUnixScheme = "unix://";
inline constexpr size_t kMaxSocketPathBytes = 107;  // sockaddr_un, less the final zero

// Returns kInvalidArgument without a field: the caller adds the key.
inline absl::Status Invalid(absl::string_view message) { return InvalidArgument("", message); }

}  // namespace pqcached::service

#endif  // PQCACHED_SERVICE_CONFIG_CONFIG_VALUES_H_

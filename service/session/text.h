// The border for texts from outside: names that are logged, listed and sent to other clients.
//
// Pure functions; thread-safe.
#ifndef PQCACHED_SERVICE_SESSION_TEXT_H_
#define PQCACHED_SERVICE_SESSION_TEXT_H_

#include <cstddef>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace pqcached::service {

// Checks that a text has at most `max_bytes`, is valid UTF-8, and is printable: without control
// characters, line and paragraph separators, and marks that change the direction of other text.
//
// Errors: kInvalidArgument  about `field`
absl::Status CheckText(absl::string_view field, absl::string_view text, size_t max_bytes);

}  // namespace pqcached::service

#endif  // PQCACHED_SERVICE_SESSION_TEXT_H_

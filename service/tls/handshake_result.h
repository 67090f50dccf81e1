// Reasons why a TLS handshake fails, and the identity of a client whose handshake has succeeded.
//
// Pure functions; thread-safe.
#ifndef PQCACHED_SERVICE_TLS_HANDSHAKE_RESULT_H_
#define PQCACHED_SERVICE_TLS_HANDSHAKE_RESULT_H_

#include <openssl/ssl.h>

#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "service/session/identity.h"

namespace pqcached::service {

struct HandshakeFailure {
  const char* reason = "";  // one word of few, for the log: "certificate_expired"
  std::string message;
};

// Explains the failure of SSL_accept, which has just returned on this thread.
HandshakeFailure FailureOf(const SSL* ssl);

// Returns the identity in the certificate of the client; nothing when it has shown none.
//
// Errors: kInvalidArgument  the certificate has no identity, a malformed one, or several
absl::StatusOr<std::optional<Identity>> IdentityOf(const SSL* ssl);

}  // namespace pqcached::service

#endif  // PQCACHED_SERVICE_TLS_HANDSHAKE_RESULT_H_

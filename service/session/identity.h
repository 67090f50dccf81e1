// Identity is the role of a client on a TLS connection, which its certificate or its token states
// as a URI:
//
//   pqcached://tenant/team-a    acts as a client of this tenant
//   pqcached://operator         acts as an operator
//   pqcached://peer/node-7      is another sidecar
//
// Plain values; the functions are thread-safe.
#ifndef PQCACHED_SERVICE_SESSION_IDENTITY_H_
#define PQCACHED_SERVICE_SESSION_IDENTITY_H_

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace pqcached::service {

struct Identity {
  enum class Kind : uint8_t { kTenant, kOperator, kPeer };

  Kind kind = Kind::kTenant;
  std::string name = {};  // of the tenant or the peer

  friend bool operator==(const Identity&, const Identity&) = default;
};

// Names have the form of a tenant's name.
//
// Errors: kInvalidArgument  the text is no identity
absl::StatusOr<Identity> ParseIdentity(absl::string_view text);
std::string IdentityText(const Identity& identity);
// Returns whether the text claims to be an identity, valid or not: other URIs have other purposes.
bool HasIdentityScheme(absl::string_view text);

}  // namespace pqcached::service

#endif  // PQCACHED_SERVICE_SESSION_IDENTITY_H_

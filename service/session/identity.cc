#include "service/session/identity.h"

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "service/base/refusal.h"
#include "service/config/tenant_uids.h"

namespace pqcached::service {
namespace {

constexpr absl::string_view kIdentityScheme = "pqcached://";

}  // namespace

bool HasIdentityScheme(absl::string_view text) { return absl::StartsWith(text, kIdentityScheme); }

absl::StatusOr<Identity> ParseIdentity(absl::string_view text) {
  absl::string_view rest = text;
  if (absl::ConsumePrefix(&rest, kIdentityScheme)) {
    if (rest == "operator") return Identity{.kind = Identity::Kind::kOperator};
    for (const auto& [prefix, kind] : {std::pair("tenant/", Identity::Kind::kTenant),
                                       std::pair("peer/", Identity::Kind::kPeer)}) {
      absl::string_view name = rest;
      if (absl::ConsumePrefix(&name, prefix) && IsTenantName(name)) {
        return Identity{.kind = kind, .name = std::string(name)};
      }
    }
  }
  return InvalidArgument(
      "",
      "must be pqcached://tenant/NAME, pqcached://operator or pqcached://peer/NAME, where NAME "
      "is 1..64 bytes of [a-z0-9_.-]");
}

std::string IdentityText(const Identity& identity) {
  switch (identity.kind) {
    case Identity::Kind::kTenant:
      return absl::StrCat(kIdentityScheme, "tenant/", identity.name);
    case Identity::Kind::kPeer:
      return absl::StrCat(kIdentityScheme, "peer/", identity.name);
    case Identity::Kind::kOperator:
      break;
  }
  return absl::StrCat(kIdentityScheme, "operator");
}

}  // namespace pqcached::service

// TenantUids maps the users of this host to tenants.
//
// Its text is a comma-separated list of uids or uid ranges with a tenant each:
//
//   1000=team-a, 2000-2999=team-b
//
// A uid may belong to several tenants: the client then names the one that it means, and without a
// name it gets the first.
//
// Plain value; thread-safe.
#ifndef PQCACHED_SERVICE_CONFIG_TENANT_UIDS_H_
#define PQCACHED_SERVICE_CONFIG_TENANT_UIDS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace pqcached::service {

class TenantUids {
 public:
  // Errors: kInvalidArgument  the message says what is wrong with the text, without a key's name
  static absl::StatusOr<TenantUids> Parse(absl::string_view text);

  bool empty() const { return entries_.empty(); }
  const std::string& text() const { return text_; }
  // Returns whether a uid is bound to this tenant; such a tenant is only for clients whose uid is
  // known.
  bool Binds(absl::string_view tenant) const;
  // Returns the tenant of a peer that claims to be `claimed` (empty: the first tenant of its uid).
  // Without any entries, the claim is accepted as it is.
  //
  // Errors: kPermissionDenied  no entry binds the uid to the claimed tenant
  absl::StatusOr<std::string> TenantOf(uint32_t uid, absl::string_view claimed) const;

 private:
  struct Entry {
    uint32_t first_uid = 0;
    uint32_t last_uid = 0;
    std::string tenant;
  };
  std::string text_;
  std::vector<Entry> entries_;
};

// Returns whether the text is a valid tenant name: 1..64 bytes of [a-z0-9_.-].
bool IsTenantName(absl::string_view tenant);

}  // namespace pqcached::service

#endif  // PQCACHED_SERVICE_CONFIG_TENANT_UIDS_H_

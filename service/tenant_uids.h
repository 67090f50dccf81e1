// TenantUids: which user of this host may be which tenant.
//
// Text: "1000=team-a, 2000-2999=team-b": a uid or a range, and a tenant; separated by commas. A uid may
// be several tenants: then it says which it means, or it is the first of them.
//
// Plain value; thread-safe.
#ifndef PQCACHED_SERVICE_TENANT_UIDS_H_
#define PQCACHED_SERVICE_TENANT_UIDS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace pqcached::service {

class TenantUids {
 public:
  // Errors: kInvalidArgument  what is wrong with the text, without a key's name
  static absl::StatusOr<TenantUids> Parse(absl::string_view text);

  bool empty() const { return entries_.empty(); }
  const std::string& text() const { return text_; }
  // Whether some uid is bound to this tenant: then only peers whose uid is known may be it.
  bool Binds(absl::string_view tenant) const;
  // The tenant of a peer that claims to be `claimed` (empty: whatever its uid is). With no entries at
  // all the claim is taken as it is.
  //
  // Errors: kPermissionDenied
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

// 1..64 bytes of [a-z0-9_.-].
bool IsTenantName(absl::string_view tenant);

}  // namespace pqcached::service

#endif  // PQCACHED_SERVICE_TENANT_UIDS_H_

#include "service/handlers/caller.h"

#include "kvstore/values.h"
#include "service/base/refusal.h"

namespace pqcached::service {

std::string_view Caller::tenant() const {
  if (role == Role::kOperator) return kvstore::kAllTenants;
  return session.tenant.empty() ? std::string_view("/") : session.tenant;
}

absl::Status Caller::Check() const {
  if (kvstore::SteadyTime::Now() >= deadline) {
    return DeadlineExceeded("", "the deadline has passed");
  }
  if (is_cancelled && is_cancelled()) return Cancelled("the caller has cancelled the call");
  return absl::OkStatus();
}

}  // namespace pqcached::service

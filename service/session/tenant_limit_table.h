// TenantLimitTable holds the limits of all tenants, which operators change while the sidecar
// serves. A change concerns what is asked for afterwards; what a tenant has already, it keeps.
//
// Thread-safe.
#ifndef PQCACHED_SERVICE_SESSION_TENANT_LIMIT_TABLE_H_
#define PQCACHED_SERVICE_SESSION_TENANT_LIMIT_TABLE_H_

#include <functional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "kvstore/mutex.h"
#include "kvstore/values.h"
#include "service/config/config.h"
#include "service/config/tenant_limits.h"

namespace pqcached::service {

class TenantLimitTable {
 public:
  explicit TenantLimitTable(const Config& config);

  // Returns the limits in force for a tenant; none of them is 0, except guaranteed_bytes.
  TenantLimits Of(const std::string& tenant) const;
  // Returns the tenants that have limits of their own, "*" included.
  std::vector<std::string> Named() const;
  // Returns the limits that the store enforces.
  kvstore::TenantQuotas Quotas() const;

  // Sets the limits of a tenant, or of "*", that are not 0 in `changes`.
  //
  // Errors: kInvalidArgument  tenant, or the limit with its range
  absl::Status Change(const std::string& tenant, const TenantLimits& changes);

 private:
  TenantLimits Resolve(const std::string& tenant) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const TenantLimits defaults_;
  mutable kvstore::Mutex mutex_;
  TenantLimitMap own_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace pqcached::service

#endif  // PQCACHED_SERVICE_SESSION_TENANT_LIMIT_TABLE_H_

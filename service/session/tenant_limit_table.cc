#include "service/session/tenant_limit_table.h"

#include "absl/strings/str_cat.h"
#include "service/base/refusal.h"

namespace pqcached::service {

using kvstore::MutexLock;

TenantLimitTable::TenantLimitTable(const Config& config)
    : defaults_(DefaultTenantLimits(config)), own_(config.tenant_limits) {
  for (const auto& [tenant, quota] : config.tenant_quotas) {
    own_[tenant].pool_bytes = quota.max_bytes;
    own_[tenant].guaranteed_bytes = quota.guaranteed_bytes;
  }
}

TenantLimits TenantLimitTable::Resolve(const std::string& tenant) const {
  TenantLimits limits = defaults_;
  for (const std::string& name : {std::string(kOtherTenants), tenant}) {
    if (const auto found = own_.find(name); found != own_.end()) Apply(found->second, limits);
  }
  return limits;
}

TenantLimits TenantLimitTable::Of(const std::string& tenant) const {
  const MutexLock lock(&mutex_);
  return Resolve(tenant);
}

std::vector<std::string> TenantLimitTable::Named() const {
  std::vector<std::string> names;
  const MutexLock lock(&mutex_);
  for (const auto& [tenant, limits] : own_) names.push_back(tenant);
  return names;
}

kvstore::TenantQuotas TenantLimitTable::Quotas() const {
  const auto quota_of = [](const TenantLimits& limits) {
    return kvstore::TenantQuota{.guaranteed_bytes = limits.guaranteed_bytes,
                                .max_bytes = limits.pool_bytes,
                                .max_caches = static_cast<uint32_t>(limits.caches),
                                .max_staging_bytes = limits.staging_bytes};
  };
  kvstore::TenantQuotas quotas;
  const MutexLock lock(&mutex_);
  quotas.others = quota_of(Resolve(kOtherTenants));
  for (const auto& [tenant, limits] : own_) quotas.by_tenant[tenant] = quota_of(Resolve(tenant));
  return quotas;
}

absl::Status TenantLimitTable::Change(const std::string& tenant, const TenantLimits& changes) {
  if (tenant != kOtherTenants && !IsTenantName(tenant)) {
    return InvalidArgument("tenant", "must be * or 1..64 bytes of [a-z0-9_.-]");
  }
  for (const TenantLimitField& field : TenantLimitFields()) {
    if (changes.*field.member > field.most) {
      return InvalidArgument(absl::StrCat("limits.", field.name),
                             absl::StrCat(changes.*field.member, ", must be at most ", field.most));
    }
  }
  const MutexLock lock(&mutex_);
  TenantLimits after = Resolve(tenant);
  Apply(changes, after);
  if (after.guaranteed_bytes > after.pool_bytes) {
    return InvalidArgument(
        "limits.guaranteed",
        absl::StrCat(after.guaranteed_bytes, " is above limits.pool, ", after.pool_bytes));
  }
  Apply(changes, own_[tenant]);
  return absl::OkStatus();
}

}  // namespace pqcached::service

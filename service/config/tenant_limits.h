// TenantLimits: how much of the sidecar one tenant may use, so that one tenant cannot starve the
// others.
//
// Its text is a comma-separated list of tenants with limits each; "*" stands for each tenant that
// is not named:
//
//   team-a=sessions:100;caches:8;weight:2,*=sessions:20
//
// Plain values; thread-safe.
#ifndef PQCACHED_SERVICE_CONFIG_TENANT_LIMITS_H_
#define PQCACHED_SERVICE_CONFIG_TENANT_LIMITS_H_

#include <cstdint>
#include <map>
#include <span>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace pqcached::service {

struct Config;

// 0 = not set: the limit of "*" holds, and without one the default (DefaultTenantLimits).
struct TenantLimits {
  uint64_t sessions = 0;          // open at once
  uint64_t caches = 0;            // open at once
  uint64_t staging_bytes = 0;     // of all its staging rings
  uint64_t builds = 0;            // that run at once
  uint64_t calls = 0;             // that wait for a thread
  uint64_t weight = 0;            // share of the threads: twice the weight, twice the threads
  uint64_t pool_bytes = 0;        // over the capacities of all its caches; key tenant_quotas
  uint64_t guaranteed_bytes = 0;  // of them, not available to others; key tenant_quotas
};
using TenantLimitMap = std::map<std::string, TenantLimits, std::less<>>;

inline constexpr char kOtherTenants[] = "*";

struct TenantLimitField {
  absl::string_view name;  // "sessions"
  uint64_t TenantLimits::*member;
  bool is_size = false;  // a number of bytes
  bool in_text = true;   // the text may name it
  uint64_t most = 0;     // largest value
};
// Returns the fields in the order of the struct.
std::span<const TenantLimitField> TenantLimitFields();

// Parses the text. Errors: kInvalidArgument  the message names the tenant or the limit
absl::StatusOr<TenantLimitMap> ParseTenantLimits(absl::string_view text);
std::string TenantLimitsText(const TenantLimitMap& limits);

// Sets each limit of `limits` that `changes` sets.
void Apply(const TenantLimits& changes, TenantLimits& limits);

// Returns the limits of a tenant for which no source has one: three quarters of max_sessions and of
// max_caches, staging for 16 sessions, and half of max_builds and of max_pending_calls; at least 1.
TenantLimits DefaultTenantLimits(const Config& config);

}  // namespace pqcached::service

#endif  // PQCACHED_SERVICE_CONFIG_TENANT_LIMITS_H_

#include "service/config/config_pressure.h"

#include <string>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "kernels/base/status_macros.h"
#include "service/config/config_values.h"

namespace pqcached::service {
namespace {

absl::Status SetRetain(absl::string_view value, Config& config) {
  if (value != "true" && value != "false") return Invalid("must be true or false");
  config.retain = value == "true";
  return absl::OkStatus();
}

absl::Status SetRetainedShare(absl::string_view value, Config& config) {
  double share = 0;
  if (!absl::SimpleAtod(value, &share) || !(share >= 0 && share <= 1)) {
    return Invalid("must be a number in 0..1");
  }
  config.max_retained_share = share;
  return absl::OkStatus();
}

absl::Status SetPolicy(absl::string_view value, Config& config) {
  if (value != "lru" && value != "reuse") return Invalid("must be lru or reuse");
  config.eviction_policy =
      value == "lru" ? kvstore::EvictionPolicy::kLru : kvstore::EvictionPolicy::kReuse;
  return absl::OkStatus();
}

absl::Status SetOomScore(absl::string_view value, Config& config) {
  int32_t score = 0;
  if (!absl::SimpleAtoi(value, &score) || score < -1000 || score > 1000) {
    return Invalid("must be a whole number in -1000..1000");
  }
  config.oom_score_adjust = score;
  return absl::OkStatus();
}

// "team-a=1gib:4gib,team-b=0:2gib,team-c=1gib"
absl::Status SetQuotas(absl::string_view value, Config& config) {
  config.tenant_quotas.clear();
  if (value.empty()) return absl::OkStatus();
  for (const absl::string_view item : absl::StrSplit(value, ',')) {
    const std::pair<absl::string_view, absl::string_view> parts =
        absl::StrSplit(item, absl::MaxSplits('=', 1));
    const std::string tenant(parts.first);
    if (!IsTenantName(tenant)) {
      return Invalid(absl::StrCat("'", tenant, "' must be 1..64 bytes of [a-z0-9_.-]"));
    }
    const std::vector<absl::string_view> sizes = absl::StrSplit(parts.second, ':');
    absl::Status malformed = Invalid(
        absl::StrCat("'", item, "' must be TENANT=GUARANTEED:MAX, for example team-a=1gib:4gib"));
    if (sizes.empty() || sizes.size() > 2) return malformed;  // empty: the item has no '='
    kvstore::TenantQuota quota;
    const auto guaranteed = ParseSize(sizes.front());
    const auto most = ParseSize(sizes.back());
    if (!guaranteed.ok() || !most.ok()) return malformed;
    quota.guaranteed_bytes = *guaranteed;
    if (sizes.size() == 2) quota.max_bytes = *most;
    if (quota.max_bytes < quota.guaranteed_bytes) {
      return Invalid(absl::StrCat("'", item, "' has a guarantee above its maximum"));
    }
    if (!config.tenant_quotas.emplace(tenant, quota).second) {
      return Invalid(absl::StrCat("'", tenant, "' is listed twice"));
    }
  }
  return absl::OkStatus();
}

std::string QuotasText(const Config& config) {
  return absl::StrJoin(config.tenant_quotas, ",", [](std::string* text, const auto& tenant_quota) {
    const kvstore::TenantQuota& quota = tenant_quota.second;
    absl::StrAppend(text, tenant_quota.first, "=", FormatSize(quota.guaranteed_bytes));
    if (quota.max_bytes == kvstore::TenantQuota().max_bytes) return;
    absl::StrAppend(text, ":", FormatSize(quota.max_bytes));
  });
}

ConfigKey DurationKey(absl::string_view name, absl::string_view text,
                      absl::Duration Config::*member, absl::Duration least) {
  return {name, "DURATION", text,
          [=](absl::string_view value, Config& config) -> absl::Status {
            absl::Duration duration;
            if (!absl::ParseDuration(value, &duration)) {
              return Invalid("must be a duration with a unit, for example 500ms, 30s, 5m");
            }
            if (duration < least || duration > absl::Hours(24)) {
              return Invalid(absl::StrCat("must be in ", absl::FormatDuration(least), "..24h"));
            }
            config.*member = duration;
            return absl::OkStatus();
          },
          [=](const Config& config) { return absl::FormatDuration(config.*member); }};
}

}  // namespace

void AddPressureKeys(std::vector<ConfigKey>& keys) {
  keys.push_back({"retain", "BOOL",
                  "When a sequence ends, its named tokens stay in steps of 128 as a cached prefix "
                  "for others that begin with them, until memory is short.",
                  SetRetain, [](const Config& c) { return c.retain ? "true" : "false"; }});
  keys.push_back(
      {"max_retained_share", "NUMBER",
       "Share of a pool, or of all that a growing cache may have, that cached prefixes may "
       "occupy: 0..1.",
       SetRetainedShare, [](const Config& c) { return absl::StrCat(c.max_retained_share); }});
  keys.push_back(
      {"eviction_policy", "POLICY",
       "Which cached prefix is evicted first: the least recently used one (lru), or the one "
       "that has served the fewest requests, where older requests count less (reuse).",
       SetPolicy, [](const Config& c) {
         return c.eviction_policy == kvstore::EvictionPolicy::kLru ? "lru" : "reuse";
       }});
  keys.push_back(
      DurationKey("evict_idle",
                  "A sequence of an open session that is not mapped, pinned or written may be "
                  "evicted when no call has used it for this long. 0 = never.",
                  &Config::evict_idle, absl::ZeroDuration()));
  keys.push_back(
      {"tenant_quotas", "LIST",
       "Pool bytes of tenants, over all their caches: TENANT=GUARANTEED:MAX, for example "
       "team-a=1gib:4gib,team-b=0:2gib. Guaranteed bytes are not available to other tenants.",
       SetQuotas, QuotasText});
  keys.push_back(
      {"tenant_limits", "LIST",
       "What one tenant may use at most: TENANT=LIMIT:N;LIMIT:N, and * for each other tenant, for "
       "example team-a=sessions:100;weight:2,*=sessions:20. Limits: sessions and caches (default "
       "three quarters of all), staging (bytes of all rings; 16 * max_staging_bytes), builds that "
       "run and calls that wait (half of all), and weight, the share of the threads (1). "
       "`pqcachectl limits` changes them while the sidecar serves.",
       [](absl::string_view value, Config& config) -> absl::Status {
         ASSIGN_OR_RETURN(config.tenant_limits, ParseTenantLimits(value));
         return absl::OkStatus();
       },
       [](const Config& c) { return TenantLimitsText(c.tenant_limits); }});
  keys.push_back(
      DurationKey("memory_check_interval",
                  "Interval at which unused memory returns to the machine (idle_reserve_bytes), "
                  "and at which the limits of the machine and of control groups are read. 0 = no "
                  "memory returns, and limits are read only when a cache is opened.",
                  &Config::memory_check_interval, absl::ZeroDuration()));
  keys.push_back({"oom_score_adjust", "NUMBER",
                  "The daemon's oom_score_adj, -1000..1000; the kernel kills processes with lower "
                  "scores later. "
                  "Lowering it needs a privilege; without that, it stays unchanged.",
                  SetOomScore, [](const Config& c) { return absl::StrCat(c.oom_score_adjust); }});
  keys.push_back(
      DurationKey("stream_timeout",
                  "Longest idle time of a stream: of an Ingest without a message, or of a "
                  "finished build whose progress is not read.",
                  &Config::stream_timeout, absl::Milliseconds(1)));
}

}  // namespace pqcached::service

#include "service/config_pressure.h"
#include "service/refusal.h"

#include <string>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"

namespace pqcached::service {
namespace {

absl::Status Invalid(absl::string_view message) { return InvalidArgument("", message); }

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
    const absl::Status malformed =
        Invalid(absl::StrCat("'", item, "' must be TENANT=GUARANTEED:MOST, as team-a=1gib:4gib"));
    if (sizes.empty() || sizes.size() > 2) return malformed;  // empty: the item has no '='
    kvstore::TenantQuota quota;
    const auto guaranteed = ParseSize(sizes.front());
    const auto most = ParseSize(sizes.back());
    if (!guaranteed.ok() || !most.ok()) return malformed;
    quota.guaranteed_bytes = *guaranteed;
    if (sizes.size() == 2) quota.max_bytes = *most;
    if (quota.max_bytes < quota.guaranteed_bytes) {
      return Invalid(absl::StrCat("'", item, "' guarantees more than there may be"));
    }
    if (!config.tenant_quotas.emplace(tenant, quota).second) {
      return Invalid(absl::StrCat("'", tenant, "' comes twice"));
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
  keys.push_back(
      {"retain", "BOOL",
       "When a request ends, closed segments of its named tokens stay for others that begin "
       "with them, until memory is short.",
       SetRetain, [](const Config& c) { return c.retain ? "true" : "false"; }});
  keys.push_back({"max_retained_share", "NUMBER", "Of a pool, that may be retained so: 0..1.",
                  SetRetainedShare,
                  [](const Config& c) { return absl::StrCat(c.max_retained_share); }});
  keys.push_back(
      {"eviction_policy", "POLICY",
       "What is retained goes first when nobody has used it for the longest time (lru), or "
       "when it has served the fewest requests, with past ones fading (reuse).",
       SetPolicy, [](const Config& c) {
         return c.eviction_policy == kvstore::EvictionPolicy::kLru ? "lru" : "reuse";
       }});
  keys.push_back(
      DurationKey("evict_idle",
                  "A sequence of a living session that nobody maps, pins or writes may be "
                  "evicted when no call came for so long. 0 = never.",
                  &Config::evict_idle, absl::ZeroDuration()));
  keys.push_back({"tenant_quotas", "LIST",
                  "Pool bytes of tenants, over all their caches: TENANT=GUARANTEED:MOST, as "
                  "team-a=1gib:4gib,team-b=0:2gib. Others cannot open what is guaranteed.",
                  SetQuotas, QuotasText});
  keys.push_back(DurationKey("memory_check_interval",
                             "How often the limits of the machine and of control groups are read "
                             "anew. 0 = only when a cache is opened.",
                             &Config::memory_check_interval, absl::ZeroDuration()));
  keys.push_back({"oom_score_adjust", "NUMBER",
                  "What the kernel adds to the daemon's badness when memory runs out, -1000..1000. "
                  "Lowering it needs a permission; without, it stays.",
                  SetOomScore, [](const Config& c) { return absl::StrCat(c.oom_score_adjust); }});
  keys.push_back(
      DurationKey("stream_timeout",
                  "How long a stream may stand still: an Ingest without a message, progress "
                  "of a finished build that is not read.",
                  &Config::stream_timeout, absl::Milliseconds(1)));
}

}  // namespace pqcached::service

#include "service/config/tenant_limits.h"

#include <algorithm>
#include <array>
#include <limits>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "kernels/base/status_macros.h"
#include "service/config/config.h"
#include "service/config/config_values.h"
#include "service/config/tenant_uids.h"

namespace pqcached::service {
namespace {

constexpr uint64_t kMostCount = uint64_t{1} << 20;
constexpr uint64_t kMostWeight = 1000;
constexpr uint64_t kMostBytes = uint64_t{1} << 46;
constexpr uint64_t kStagingSessions = 16;

constexpr std::array kFields = {
    TenantLimitField{.name = "sessions", .member = &TenantLimits::sessions, .most = kMostCount},
    TenantLimitField{.name = "caches", .member = &TenantLimits::caches, .most = kMostCount},
    TenantLimitField{.name = "staging",
                     .member = &TenantLimits::staging_bytes,
                     .is_size = true,
                     .most = kMostBytes},
    TenantLimitField{.name = "builds", .member = &TenantLimits::builds, .most = kMostCount},
    TenantLimitField{.name = "calls", .member = &TenantLimits::calls, .most = kMostCount},
    TenantLimitField{.name = "weight", .member = &TenantLimits::weight, .most = kMostWeight},
    TenantLimitField{.name = "pool",
                     .member = &TenantLimits::pool_bytes,
                     .is_size = true,
                     .in_text = false,
                     .most = kMostBytes},
    TenantLimitField{.name = "guaranteed",
                     .member = &TenantLimits::guaranteed_bytes,
                     .is_size = true,
                     .in_text = false,
                     .most = kMostBytes},
};

std::string NamesInText() {
  std::string names;
  for (const TenantLimitField& field : kFields) {
    if (field.in_text) absl::StrAppend(&names, names.empty() ? "" : ", ", field.name);
  }
  return names;
}

absl::StatusOr<uint64_t> ParseValue(const TenantLimitField& field, absl::string_view text) {
  uint64_t value = 0;
  if (field.is_size) {
    const absl::StatusOr<size_t> size = ParseSize(text);
    if (!size.ok()) return Invalid(absl::StrCat(field.name, " ", TextOf(size.status())));
    value = *size;
  } else if (!absl::SimpleAtoi(text, &value)) {
    return Invalid(absl::StrCat(field.name, " must be a whole number"));
  }
  if (value < 1 || value > field.most) {
    return Invalid(absl::StrCat(field.name, " must be in 1..", field.most));
  }
  return value;
}

absl::Status ParseLimit(absl::string_view text, TenantLimits& limits) {
  const std::pair<absl::string_view, absl::string_view> parts =
      absl::StrSplit(text, absl::MaxSplits(':', 1));
  for (const TenantLimitField& field : kFields) {
    if (!field.in_text || field.name != parts.first) continue;
    if (limits.*field.member != 0) return Invalid(absl::StrCat(field.name, " is set twice"));
    ASSIGN_OR_RETURN(limits.*field.member, ParseValue(field, parts.second));
    return absl::OkStatus();
  }
  return Invalid(absl::StrCat("'", text, "' must be LIMIT:N with a limit of ", NamesInText()));
}

}  // namespace

std::span<const TenantLimitField> TenantLimitFields() { return kFields; }

absl::StatusOr<TenantLimitMap> ParseTenantLimits(absl::string_view text) {
  TenantLimitMap all;
  if (text.empty()) return all;
  for (const absl::string_view item : absl::StrSplit(text, ',')) {
    const std::pair<absl::string_view, absl::string_view> parts =
        absl::StrSplit(item, absl::MaxSplits('=', 1));
    const std::string tenant(parts.first);
    if (tenant != kOtherTenants && !IsTenantName(tenant)) {
      return Invalid(absl::StrCat("'", tenant, "' must be * or 1..64 bytes of [a-z0-9_.-]"));
    }
    const auto [added, is_new] = all.try_emplace(tenant);
    if (!is_new) return Invalid(absl::StrCat("'", tenant, "' is listed twice"));
    if (parts.second.empty()) {
      return Invalid(absl::StrCat("'", item, "' must be TENANT=LIMIT:N;LIMIT:N"));
    }
    for (const absl::string_view limit : absl::StrSplit(parts.second, ';')) {
      if (absl::Status status = ParseLimit(limit, added->second); !status.ok()) {
        return Invalid(absl::StrCat("'", tenant, "': ", TextOf(status)));
      }
    }
  }
  return all;
}

std::string TenantLimitsText(const TenantLimitMap& all) {
  return absl::StrJoin(all, ",", [](std::string* text, const auto& entry) {
    absl::StrAppend(text, entry.first, "=");
    const char* separator = "";
    for (const TenantLimitField& field : kFields) {
      const uint64_t value = entry.second.*field.member;
      if (value == 0 || !field.in_text) continue;
      absl::StrAppend(text, separator, field.name, ":",
                      field.is_size ? FormatSize(value) : absl::StrCat(value));
      separator = ";";
    }
  });
}

void Apply(const TenantLimits& changes, TenantLimits& limits) {
  for (const TenantLimitField& field : kFields) {
    if (changes.*field.member != 0) limits.*field.member = changes.*field.member;
  }
}

TenantLimits DefaultTenantLimits(const Config& config) {
  const auto most_of = [](uint64_t all) { return (3 * all + 3) / 4; };
  const auto half_of = [](uint64_t all) { return (all + 1) / 2; };
  return {.sessions = most_of(config.max_sessions),
          .caches = most_of(config.max_caches),
          .staging_bytes = kStagingSessions * uint64_t{config.max_staging_bytes},
          .builds = half_of(config.max_builds),
          .calls = half_of(config.max_pending_calls),
          .weight = 1,
          .pool_bytes = std::numeric_limits<uint64_t>::max(),
          .guaranteed_bytes = 0};
}

}  // namespace pqcached::service

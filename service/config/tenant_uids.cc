#include "service/config/tenant_uids.h"

#include <algorithm>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "service/base/refusal.h"

namespace pqcached::service {
namespace {

constexpr size_t kMaxTenantBytes = 64;

bool IsTenantCharacter(char c) {
  return (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '_' || c == '.' || c == '-';
}

}  // namespace

bool IsTenantName(absl::string_view tenant) {
  return !tenant.empty() && tenant.size() <= kMaxTenantBytes &&
         std::all_of(tenant.begin(), tenant.end(), IsTenantCharacter);
}

absl::StatusOr<TenantUids> TenantUids::Parse(absl::string_view text) {
  TenantUids uids;
  uids.text_ = std::string(text);
  for (absl::string_view part : absl::StrSplit(text, ',', absl::SkipWhitespace())) {
    part = absl::StripAsciiWhitespace(part);
    const std::pair<absl::string_view, absl::string_view> halves =
        absl::StrSplit(part, absl::MaxSplits('=', 1));
    const std::pair<absl::string_view, absl::string_view> range =
        absl::StrSplit(halves.first, absl::MaxSplits('-', 1));
    Entry entry;
    const bool first = absl::SimpleAtoi(range.first, &entry.first_uid);
    entry.last_uid = entry.first_uid;
    const bool last = range.second.empty() || absl::SimpleAtoi(range.second, &entry.last_uid);
    if (!first || !last || entry.last_uid < entry.first_uid || !IsTenantName(halves.second)) {
      return InvalidArgument(
          "",
          absl::StrCat("must be a list such as '1000=team-a, 2000-2999=team-b'; invalid entry '",
                       part, "'"));
    }
    entry.tenant = std::string(halves.second);
    uids.entries_.push_back(std::move(entry));
  }
  return uids;
}

bool TenantUids::Binds(absl::string_view tenant) const {
  return std::any_of(entries_.begin(), entries_.end(),
                     [&](const Entry& entry) { return entry.tenant == tenant; });
}

absl::StatusOr<std::string> TenantUids::TenantOf(uint32_t uid, absl::string_view claimed) const {
  if (entries_.empty()) return std::string(claimed);
  for (const Entry& entry : entries_) {
    if (uid < entry.first_uid || uid > entry.last_uid) continue;
    if (claimed.empty() || claimed == entry.tenant) return entry.tenant;
  }
  return PermissionDenied("tenant",
                          claimed.empty()
                              ? absl::StrCat("uid ", uid, " has no tenant (tenant_uids)")
                              : absl::StrCat("uid ", uid, " is not '", claimed, "' (tenant_uids)"));
}

}  // namespace pqcached::service

#include "service/session/sessions.h"

#include <sys/random.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>

#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "service/base/refusal.h"
#include "service/config/tenant_uids.h"
#include "service/session/text.h"

namespace pqcached::service {

using kvstore::MutexLock;

namespace {

constexpr size_t kMaxClientNameBytes = 128;
constexpr size_t kTokenBytes = 16;

}  // namespace

absl::StatusOr<OpenedSession> Sessions::Open(absl::string_view tenant,
                                             absl::string_view client_name, uint32_t peer_pid) {
  if (tenant.empty()) tenant = "default";
  if (!IsTenantName(tenant)) {
    return InvalidArgument("tenant", "must be 1..64 bytes of [a-z0-9_.-]");
  }
  if (absl::Status status = CheckText("client_name", client_name, kMaxClientNameBytes);
      !status.ok()) {
    return status;
  }
  OpenedSession opened{RandomHex(kTokenBytes),
                       {"", std::string(tenant), std::string(client_name), peer_pid, 0}};
  const MutexLock lock(&mutex_);
  if (by_token_.size() >= max_sessions_) {
    return ResourceExhausted(
        "max_sessions", absl::StrCat(max_sessions_, " sessions are already open"), kRetryMemory);
  }
  const std::string& name = opened.session.tenant;
  const uint64_t most = limits_ == nullptr ? max_sessions_ : limits_->Of(name).sessions;
  if (const uint32_t count = CountLocked(name); count >= most) {
    return ResourceExhausted(
        "tenant_limits.sessions",
        absl::StrCat("tenant ", tenant, " has ", count, " open sessions, and may have ", most),
        kRetryMemory);
  }
  opened.session.number = ++opened_count_;
  opened.session.id = absl::StrCat(client_name, "#", opened.session.number);
  by_token_.emplace(opened.token, Entry{.session = opened.session});
  return opened;
}

Session Sessions::Restore(const kvstore::KeptSession& kept) {
  Session session{kept.id, kept.tenant, kept.client_name, 0, 0};
  const absl::string_view id = kept.id;
  const MutexLock lock(&mutex_);
  if (!absl::SimpleAtoi(id.substr(id.rfind('#') + 1), &session.number)) session.number = 0;
  opened_count_ = std::max(opened_count_, session.number);
  by_token_[kept.token] = {.session = session, .detached = true};
  return session;
}

absl::StatusOr<OpenedSession> Sessions::Resume(absl::string_view token, uint32_t peer_pid) {
  const MutexLock lock(&mutex_);
  const auto found = by_token_.find(token);
  if (found == by_token_.end()) {
    return NotFound("resume_token", "no such session, or it has ended");
  }
  if (!found->second.detached) {
    return FailedPrecondition("resume_token", "the session's client is still connected");
  }
  found->second.detached = false;
  found->second.session.peer_pid = peer_pid;
  return OpenedSession{found->first, found->second.session};
}

void Sessions::Detach(absl::string_view token) {
  const MutexLock lock(&mutex_);
  const auto found = by_token_.find(token);
  if (found != by_token_.end()) found->second.detached = true;
}

absl::StatusOr<Session> Sessions::Find(absl::string_view token) const {
  const MutexLock lock(&mutex_);
  const auto found = by_token_.find(token);
  if (found == by_token_.end()) {
    return Unauthenticated("pqcached-session", "no such session, or it has ended");
  }
  return found->second.session;
}

bool Sessions::Close(absl::string_view token) {
  const MutexLock lock(&mutex_);
  const auto found = by_token_.find(token);
  if (found == by_token_.end() || leaves_sessions_) return false;
  by_token_.erase(found);
  return true;
}

bool Sessions::CloseDetached(absl::string_view token) {
  const MutexLock lock(&mutex_);
  const auto found = by_token_.find(token);
  if (found == by_token_.end() || !found->second.detached || leaves_sessions_) return false;
  by_token_.erase(found);
  return true;
}

void Sessions::LeaveToNextWorker() {
  const MutexLock lock(&mutex_);
  leaves_sessions_ = true;
}

uint32_t Sessions::count() const {
  const MutexLock lock(&mutex_);
  return static_cast<uint32_t>(by_token_.size());
}

uint32_t Sessions::CountOf(std::string_view tenant) const {
  const MutexLock lock(&mutex_);
  return CountLocked(tenant);
}

uint32_t Sessions::CountLocked(std::string_view tenant) const {
  if (tenant == kvstore::kAllTenants) return static_cast<uint32_t>(by_token_.size());
  return static_cast<uint32_t>(
      std::count_if(by_token_.begin(), by_token_.end(),
                    [&](const auto& each) { return each.second.session.tenant == tenant; }));
}

std::vector<SessionInfo> Sessions::List(std::string_view tenant) const {
  std::vector<SessionInfo> sessions;
  {
    const kvstore::SteadyTime now = kvstore::SteadyTime::Now();
    const MutexLock lock(&mutex_);
    for (const auto& [token, entry] : by_token_) {
      if (tenant != kvstore::kAllTenants && entry.session.tenant != tenant) continue;
      sessions.push_back({entry.session, entry.detached, now - entry.opened});
    }
  }
  std::sort(sessions.begin(), sessions.end(), [](const SessionInfo& a, const SessionInfo& b) {
    return a.session.number < b.session.number;
  });
  return sessions;
}

std::vector<Session> Sessions::OfTenant(std::string_view tenant) const {
  std::vector<Session> sessions;
  const MutexLock lock(&mutex_);
  for (const auto& [token, entry] : by_token_) {
    if (entry.session.tenant == tenant) sessions.push_back(entry.session);
  }
  return sessions;
}

uint32_t Sessions::PeerPidOf(absl::string_view session_id) const {
  const MutexLock lock(&mutex_);
  for (const auto& [token, entry] : by_token_) {
    if (entry.session.id == session_id) return entry.session.peer_pid;
  }
  return 0;
}

absl::string_view ClientNameOf(absl::string_view session_id) {
  return session_id.substr(0, session_id.rfind('#'));
}

std::string RandomHex(size_t bytes) {
  std::string raw(bytes, '\0');
  size_t filled = 0;
  while (filled < bytes) {
    const ssize_t got = getrandom(raw.data() + filled, bytes - filled, 0);
    if (got < 0 && errno != EINTR) std::abort();  // the kernel always has getrandom
    if (got > 0) filled += static_cast<size_t>(got);
  }
  return absl::BytesToHexString(raw);
}

}  // namespace pqcached::service

#include "service/sessions.h"

#include <sys/random.h>

#include <cerrno>
#include <cstdlib>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "service/tenant_uids.h"

namespace pqcached::service {
namespace {

constexpr size_t kMaxClientNameBytes = 128;
constexpr size_t kTokenBytes = 16;

}  // namespace

absl::StatusOr<OpenedSession> Sessions::Open(absl::string_view tenant,
                                             absl::string_view client_name, uint32_t peer_pid) {
  if (tenant.empty()) tenant = "default";
  if (!IsTenantName(tenant)) {
    return absl::InvalidArgumentError("open.tenant: must be 1..64 bytes of [a-z0-9_.-]");
  }
  if (client_name.size() > kMaxClientNameBytes) {
    return absl::InvalidArgumentError(absl::StrCat(
        "open.client_name: ", client_name.size(), " bytes, must be at most ", kMaxClientNameBytes));
  }
  OpenedSession opened{RandomHex(kTokenBytes),
                       {"", std::string(tenant), std::string(client_name), peer_pid}};
  absl::MutexLock lock(&mutex_);
  if (by_token_.size() >= max_sessions_) {
    return absl::ResourceExhaustedError(
        absl::StrCat("max_sessions: ", max_sessions_, " sessions are open already"));
  }
  opened.session.id = absl::StrCat(client_name, "#", ++opened_count_);
  by_token_.emplace(opened.token, opened.session);
  return opened;
}

absl::StatusOr<Session> Sessions::Find(absl::string_view token) const {
  absl::MutexLock lock(&mutex_);
  const auto found = by_token_.find(token);
  if (found == by_token_.end()) {
    return absl::UnauthenticatedError(
        "metadata pqcached-session: no such session, or it has ended");
  }
  return found->second;
}

void Sessions::Close(absl::string_view token) {
  absl::MutexLock lock(&mutex_);
  const auto found = by_token_.find(token);
  if (found != by_token_.end()) by_token_.erase(found);
}

uint32_t Sessions::count() const {
  absl::MutexLock lock(&mutex_);
  return static_cast<uint32_t>(by_token_.size());
}

uint32_t Sessions::PeerPidOf(absl::string_view session_id) const {
  absl::MutexLock lock(&mutex_);
  for (const auto& [token, session] : by_token_) {
    if (session.id == session_id) return session.peer_pid;
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

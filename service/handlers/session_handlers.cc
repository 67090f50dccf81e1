#include "service/handlers/session_handlers.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "kernels/base/status_macros.h"
#include "service/base/log.h"
#include "service/base/refusal.h"
#include "service/base/version.h"

namespace pqcached::service {
namespace {

// Returns an error of Sessions with its path in SessionRequest. A limit of the sidecar is no field
// of it.
absl::Status UnderOpen(const absl::Status& status) {
  return absl::IsResourceExhausted(status) ? status : PrefixField("open", status);
}

}  // namespace

absl::StatusOr<OpenedSession> SessionHandlers::Open(const v1::SessionOpen& open,
                                                    const std::optional<Identity>& identity) {
  if (open.protocol_version() != kProtocolVersion) {
    return InvalidArgument("open.protocol_version",
                           absl::StrCat(open.protocol_version(), ", must be ", kProtocolVersion));
  }
  const bool resumes = !open.resume_token().empty();
  absl::StatusOr<OpenedSession> opened = resumes ? Resume(open, identity) : OpenNew(open, identity);
  if (!opened.ok()) {
    shortages_.Note("Session", opened.status());
    return opened;
  }
  log_.Info(resumes ? "session_resumed" : "session_opened",
            {{"session", opened->session.id}, {"tenant", opened->session.tenant}});
  return opened;
}

void SessionHandlers::Close(const OpenedSession& opened) {
  if (!sessions_.Close(opened.token)) return;  // false: left to the next worker
  const Session& session = opened.session;
  const uint32_t dropped = store_.DropSession(session.id);
  log_.Info("session_ended",
            {{"session", session.id}, {"tenant", session.tenant}, {"sequences_dropped", dropped}});
}

void SessionHandlers::Detach(const OpenedSession& session) {
  sessions_.Detach(session.token);
  detached_.AwaitResume(session);
}

absl::Status SessionHandlers::CheckTenant(absl::string_view tenant,
                                          const std::optional<Identity>& identity) const {
  if (identity.has_value()) {
    if (tenant == identity->name) return absl::OkStatus();
    return PermissionDenied("open.tenant", absl::StrCat("'", tenant, "' is not the tenant of ",
                                                        IdentityText(*identity)));
  }
  if (!config_.tenant_uids.Binds(std::string(tenant))) return absl::OkStatus();
  return PermissionDenied("open.tenant",
                          "is bound to uids (tenant_uids); open its sessions through the broker");
}

absl::StatusOr<OpenedSession> SessionHandlers::OpenNew(const v1::SessionOpen& open,
                                                       const std::optional<Identity>& identity) {
  const std::string otherwise = identity.has_value() ? identity->name : "default";
  const std::string& tenant = open.tenant().empty() ? otherwise : open.tenant();
  absl::Status status = CheckTenant(tenant, identity);
  if (!status.ok()) return status;
  absl::StatusOr<OpenedSession> opened = sessions_.Open(tenant, open.client_name());
  if (!opened.ok()) return UnderOpen(opened.status());
  const Session& session = opened->session;
  status = store_.KeepSession({session.id, session.tenant, session.client_name, opened->token});
  if (status.ok()) return opened;
  sessions_.Close(opened->token);
  return status;
}

absl::StatusOr<OpenedSession> SessionHandlers::Resume(const v1::SessionOpen& open,
                                                      const std::optional<Identity>& identity) {
  if (const absl::StatusOr<Session> known = sessions_.Find(open.resume_token()); known.ok()) {
    RETURN_IF_ERROR(CheckTenant(known->tenant, identity));
  }
  absl::StatusOr<OpenedSession> resumed = sessions_.Resume(open.resume_token());
  if (resumed.ok()) return resumed;
  return UnderOpen(resumed.status());
}

}  // namespace pqcached::service

// SessionHandlers opens, resumes and closes the sessions of Session streams.
//
// Thread-safe.
#ifndef PQCACHED_SERVICE_HANDLERS_SESSION_HANDLERS_H_
#define PQCACHED_SERVICE_HANDLERS_SESSION_HANDLERS_H_

#include <optional>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "kvstore/store.h"
#include "pqcached/v1/kv_cache.pb.h"
#include "service/base/shortage_log.h"
#include "service/config/config.h"
#include "service/session/detached_sessions.h"
#include "service/session/identity.h"
#include "service/session/sessions.h"

namespace pqcached::service {

class SessionHandlers {
 public:
  SessionHandlers(const Config& config, kvstore::Store& store, Sessions& sessions,
                  DetachedSessions& detached, Log& log)
      : config_(config),
        store_(store),
        sessions_(sessions),
        detached_(detached),
        log_(log),
        shortages_(log) {}

  // Opens a new session, or resumes a detached one. With an identity, which is a tenant's, the
  // session is of that tenant.
  //
  // Errors: those of Sessions, under `open`; kInvalidArgument  open.protocol_version
  //         kPermissionDenied  the tenant is bound to uids, or is not that of the identity
  absl::StatusOr<OpenedSession> Open(const v1::SessionOpen& open,
                                     const std::optional<Identity>& identity = std::nullopt);

  // Ends a session and drops its sequences, unless they are left to the next worker.
  void Close(const OpenedSession& session);
  // Leaves a session to its client that has not received the reply to its resume: it may resume it
  // again.
  void Detach(const OpenedSession& session);

 private:
  // Refuses a tenant that is not the identity's. Without an identity refuses tenants that are bound
  // to uids, because gRPC does not provide the peer's uid.
  absl::Status CheckTenant(absl::string_view tenant, const std::optional<Identity>& identity) const;
  absl::StatusOr<OpenedSession> OpenNew(const v1::SessionOpen& open,
                                        const std::optional<Identity>& identity);
  absl::StatusOr<OpenedSession> Resume(const v1::SessionOpen& open,
                                       const std::optional<Identity>& identity);

  const Config& config_;
  kvstore::Store& store_;
  Sessions& sessions_;
  DetachedSessions& detached_;
  Log& log_;
  ShortageLog shortages_;
};

}  // namespace pqcached::service

#endif  // PQCACHED_SERVICE_HANDLERS_SESSION_HANDLERS_H_

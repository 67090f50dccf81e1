// Sessions maps the secret token of each open session to its session. A session is a client that
// holds a Session stream or a connection to the broker.
//
// A session of an earlier worker is *detached* until its client resumes it; its token is valid in
// the meantime.
//
// Thread-safe. The one lock is held for a map operation; the store is never called under it.
#ifndef PQCACHED_SERVICE_SESSION_SESSIONS_H_
#define PQCACHED_SERVICE_SESSION_SESSIONS_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "kvstore/clock.h"
#include "kvstore/mutex.h"
#include "kvstore/values.h"
#include "service/session/tenant_limit_table.h"

namespace pqcached::service {

struct Session {
  std::string id;  // names the session in the store; not a secret
  std::string tenant;
  std::string client_name;
  uint32_t peer_pid = 0;  // pid of the client of a broker connection; 0 = unknown
  uint64_t number = 0;    // the number at the end of `id`; unique among open sessions
};

struct SessionInfo {
  Session session;
  bool detached = false;  // waits for its client after a restart of the worker
  absl::Duration age;     // since it was opened or restored
};
using SessionFilter = std::function<bool(const Session&)>;

struct OpenedSession {
  std::string token;  // 128 random bits in hex; a secret
  Session session;
};

class Sessions {
 public:
  // `limits`: of tenants; null = none. Outlives the object.
  explicit Sessions(uint32_t max_sessions, const TenantLimitTable* limits = nullptr)
      : max_sessions_(max_sessions), limits_(limits) {}

  // Opens a session. An empty tenant means "default".
  //
  // Errors: kInvalidArgument    open.tenant, open.client_name
  //         kResourceExhausted  max_sessions, or the tenant's limit of sessions
  absl::StatusOr<OpenedSession> Open(absl::string_view tenant, absl::string_view client_name,
                                     uint32_t peer_pid = 0);

  // Restores a session of an earlier worker, as detached. Never refuses, but counts the session
  // against max_sessions.
  Session Restore(const kvstore::KeptSession& kept);

  // Assigns a detached session to the client that presents its token.
  //
  // Errors: kNotFound            no such session, or it has ended
  //         kFailedPrecondition  it is not detached
  absl::StatusOr<OpenedSession> Resume(absl::string_view token, uint32_t peer_pid = 0);
  // Detaches a session again whose client was not reached. No effect when the session has ended.
  void Detach(absl::string_view token);

  // Returns the session of the token.
  //
  // Errors: kUnauthenticated  no such session, or it has ended
  absl::StatusOr<Session> Find(absl::string_view token) const;

  bool IsOpen(absl::string_view token) const { return Find(token).ok(); }

  // Closes the session, so that Find fails from now on. Returns true when the caller must drop its
  // sequences, false when the session is left to the next worker or has ended already.
  bool Close(absl::string_view token);
  // Closes the session like Close, but only if it is detached.
  bool CloseDetached(absl::string_view token);
  // Leaves all sessions to the next worker from now on, because this worker is ending: Close has no
  // effect any more.
  void LeaveToNextWorker();

  uint32_t count() const;
  // Returns the number of sessions of a tenant, or of kvstore::kAllTenants.
  uint32_t CountOf(std::string_view tenant) const;
  std::vector<Session> OfTenant(std::string_view tenant) const;
  // Describes the sessions of a tenant, or of kvstore::kAllTenants, by number.
  std::vector<SessionInfo> List(std::string_view tenant) const;
  // Returns the peer's pid of the session with this id; 0 when it is unknown.
  uint32_t PeerPidOf(absl::string_view session_id) const;

 private:
  uint32_t CountLocked(std::string_view tenant) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const uint32_t max_sessions_;
  const TenantLimitTable* const limits_;
  mutable kvstore::Mutex mutex_;
  struct Entry {
    Session session;
    bool detached = false;
    kvstore::SteadyTime opened = kvstore::SteadyTime::Now();
  };
  absl::flat_hash_map<std::string, Entry> by_token_ ABSL_GUARDED_BY(mutex_);
  bool leaves_sessions_ ABSL_GUARDED_BY(mutex_) = false;
  uint64_t opened_count_ ABSL_GUARDED_BY(mutex_) = 0;
};

// Returns the client name that is part of Session::id.
absl::string_view ClientNameOf(absl::string_view session_id);

// Returns `bytes` random bytes from the kernel, in hex.
std::string RandomHex(size_t bytes);

}  // namespace pqcached::service

#endif  // PQCACHED_SERVICE_SESSION_SESSIONS_H_

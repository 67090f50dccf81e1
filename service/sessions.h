// Sessions are the clients that hold a Session stream or a connection of the broker: who they are, by
// the secret token that they were given.
//
// Thread-safe. One lock, held for a map operation; the store is never called under it.
#ifndef PQCACHED_SERVICE_SESSIONS_H_
#define PQCACHED_SERVICE_SESSIONS_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include "absl/strings/string_view.h"

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"

namespace pqcached::service {

struct Session {
  std::string id;  // names it in the store; no secret
  std::string tenant;
  std::string client_name;
  uint32_t peer_pid = 0;  // of the process behind a broker's connection; 0 = not known
};

struct OpenedSession {
  std::string token;  // 128 random bits in hex; a secret
  Session session;
};

class Sessions {
 public:
  explicit Sessions(uint32_t max_sessions) : max_sessions_(max_sessions) {}

  // Empty tenant = "default".
  //
  // Errors: kInvalidArgument    open.tenant, open.client_name
  //         kResourceExhausted  max_sessions
  absl::StatusOr<OpenedSession> Open(absl::string_view tenant, absl::string_view client_name,
                                     uint32_t peer_pid = 0);

  // Errors: kUnauthenticated  no such session, or it has ended
  absl::StatusOr<Session> Find(absl::string_view token) const;

  bool IsOpen(absl::string_view token) const { return Find(token).ok(); }

  // Ends it: from now on Find fails. The caller drops its sequences afterwards.
  void Close(absl::string_view token);

  uint32_t count() const;
  // Of the session with this id; 0 when it is not known.
  uint32_t PeerPidOf(absl::string_view session_id) const;

 private:
  const uint32_t max_sessions_;
  mutable absl::Mutex mutex_;
  absl::flat_hash_map<std::string, Session> by_token_ ABSL_GUARDED_BY(mutex_);
  uint64_t opened_count_ ABSL_GUARDED_BY(mutex_) = 0;
};

// The name that the client gave, out of Session::id.
absl::string_view ClientNameOf(absl::string_view session_id);

// `bytes` random bytes from the kernel, as hex.
std::string RandomHex(size_t bytes);

}  // namespace pqcached::service

#endif  // PQCACHED_SERVICE_SESSIONS_H_

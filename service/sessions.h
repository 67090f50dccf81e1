// Sessions are the clients that hold a Session stream or a connection of the broker: who they are, by
// the secret token that they were given.
//
// A session of an earlier worker is *detached* until its client resumes it; its token is good meanwhile.
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
#include "kvstore/store.h"

namespace pqcached::service {

struct Session {
  std::string id;  // names it in the store; no secret
  std::string tenant;
  std::string client_name;
  uint32_t peer_pid = 0;  // of the process behind a broker's connection; 0 = not known
  uint64_t number = 0;    // the end of its id; of no other session that is open
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

  // A session that an earlier worker has kept: it is detached. Never refused, but counted against max_sessions.
  Session Restore(const kvstore::KeptSession& kept);

  // Gives a detached session to the client that knows its token.
  //
  // Errors: kNotFound            no such session, or it has ended
  //         kFailedPrecondition  it is not detached
  absl::StatusOr<OpenedSession> Resume(absl::string_view token, uint32_t peer_pid = 0);
  // The client was not reached. No effect when it has ended.
  void Detach(absl::string_view token);

  // Errors: kUnauthenticated  no such session, or it has ended
  absl::StatusOr<Session> Find(absl::string_view token) const;

  bool IsOpen(absl::string_view token) const { return Find(token).ok(); }

  // Ends it: from now on Find fails. True: the caller drops its sequences afterwards. False: it is left
  // to the next worker, or has ended already.
  bool Close(absl::string_view token);
  // Likewise, but only while it is detached.
  bool CloseDetached(absl::string_view token);
  // From now on sessions whose clients go away are left to the next worker: this one is ending.
  void Leave();

  uint32_t count() const;
  // Of the session with this id; 0 when it is not known.
  uint32_t PeerPidOf(absl::string_view session_id) const;

 private:
  const uint32_t max_sessions_;
  mutable absl::Mutex mutex_;
  struct Entry {
    Session session;
    bool detached = false;
  };
  absl::flat_hash_map<std::string, Entry> by_token_ ABSL_GUARDED_BY(mutex_);
  bool leaving_ ABSL_GUARDED_BY(mutex_) = false;
  uint64_t opened_count_ ABSL_GUARDED_BY(mutex_) = 0;
};

// The name that the client gave, out of Session::id.
absl::string_view ClientNameOf(absl::string_view session_id);

// `bytes` random bytes from the kernel, as hex.
std::string RandomHex(size_t bytes);

}  // namespace pqcached::service

#endif  // PQCACHED_SERVICE_SESSIONS_H_

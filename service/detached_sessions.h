// DetachedSessions: the sessions of earlier workers, until their clients have come back, or will not.
//
// A session that was open when its worker ended goes on in the next one under its token. It is *detached*
// until its client resumes it. While the client's old connection is open (whoever supervises the worker
// holds it), it may take as long as it likes: an engine that computes nothing makes no calls. Without
// one, its session is dropped after resume_timeout, as if the engine had died.
//
// An old connection ends when its client has unmapped all that came over it, or has died. When all have
// ended, memory that was handed out by earlier workers and belongs to nobody now may be used again.
//
// Start and Stop belong to one thread; Await is thread-safe. One thread of its own, when there is need.
#ifndef PQCACHED_SERVICE_DETACHED_SESSIONS_H_
#define PQCACHED_SERVICE_DETACHED_SESSIONS_H_

#include <chrono>
#include <map>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "kvstore/keeper.h"
#include "kvstore/store.h"
#include "service/calls.h"
#include "service/config.h"
#include "service/sessions.h"

namespace pqcached::service {

class Log;

// Who keeps what of local sessions beyond the end of this process; null = nobody. May be the same.
struct SessionKeepers {
  kvstore::DescriptorKeeper* memory = nullptr;       // that of the store: StoreOptions::keeper
  kvstore::DescriptorKeeper* connections = nullptr;  // and control memory
};

class DetachedSessions {
 public:
  struct Parts {
    const Config& config;
    kvstore::Store& store;
    Sessions& sessions;
    Calls& calls;
    Log& log;
    SessionKeepers keepers;
  };

  explicit DetachedSessions(Parts parts);
  // As Stop.
  ~DetachedSessions();

  // Restores the sessions that the store has kept, drops the sequences of others, and tells clients of
  // earlier workers that those have ended. Before anything is served.
  void Start();
  void Stop();

  // A session whose client was not reached when it resumed it waits anew.
  void Await(const OpenedSession& session);

 private:
  using Clock = std::chrono::steady_clock;  // wall time jumps
  struct Connection {
    kvstore::FileDescriptor socket;
    uint64_t session_number = 0;
  };
  struct Waiting {
    Session session;
    Clock::time_point until;  // max = while one of its connections is open
  };

  void EndKept(kvstore::DescriptorKeeper* keeper);
  void Restore();
  void DropOrphans(const std::set<std::string>& known);
  void Run();
  void Poll();
  bool HasEnded(const Connection& connection);
  void OnEnded(const std::string& name);
  void DropOverdue();
  Clock::time_point ResumeDeadline() const;

  const Parts parts_;
  const kvstore::FileDescriptor wake_;             // eventfd
  std::map<std::string, Connection> connections_;  // by name; of the thread, once it runs
  absl::Mutex mutex_;
  std::map<std::string, Waiting> waiting_ ABSL_GUARDED_BY(mutex_);  // by token
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace pqcached::service

#endif  // PQCACHED_SERVICE_DETACHED_SESSIONS_H_

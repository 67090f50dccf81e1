// DetachedSessions holds the sessions of earlier workers until their clients resume them or their
// time has run out.
//
// A session that was open when its worker ended continues in the next worker under the same token.
// It is *detached* until its client resumes it. While the client's old connection is open (the
// supervisor of the worker holds it), the client may take any time: an engine that computes nothing
// makes no calls. Once that connection has ended, the session is dropped after resume_timeout, as
// if the engine had died.
//
// An old connection ends when its client has unmapped all memory that it received over it, or has
// died. The staging ring that it received over it is then freed. Memory of a cache that earlier
// workers handed out and that no sequence uses may be allocated again when all those old
// connections have ended over which its pool was sent. After quarantine_timeout the worker is
// restarted instead, so that the next one moves the pool (Store::PlanPoolMove): a client of an old
// connection cannot keep memory from other clients of its tenant.
//
// Start and Stop must be called on one thread; the other functions are thread-safe. The object has
// a thread of its own, if it needs one.
#ifndef PQCACHED_SERVICE_SESSION_DETACHED_SESSIONS_H_
#define PQCACHED_SERVICE_SESSION_DETACHED_SESSIONS_H_

#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "kvstore/memory/keeper.h"
#include "kvstore/mutex.h"
#include "kvstore/share/control_memory.h"
#include "kvstore/store.h"
#include "service/base/executor.h"
#include "service/config/config.h"
#include "service/session/sessions.h"

namespace pqcached::service {

class Log;

// Keepers of the resources of local sessions beyond the end of this process; null = none. Both may
// be the same object.
struct SessionKeepers {
  kvstore::DescriptorKeeper* memory = nullptr;       // the store's keeper: StoreOptions::keeper
  kvstore::DescriptorKeeper* connections = nullptr;  // keeps connections and control memory
};

class DetachedSessions {
 public:
  struct Parts {
    const Config& config;
    kvstore::Store& store;
    Sessions& sessions;
    Executor& cleanups;  // runs what is left to do when a session has ended
    Log& log;
    SessionKeepers keepers = {};
    std::function<absl::Status()> request_restart = {};  // see ServerOptions
  };

  explicit DetachedSessions(Parts parts);
  // Calls Stop.
  ~DetachedSessions();

  // Restores the sessions that the store has kept, drops the sequences of other sessions, and
  // notifies the clients of earlier workers that those workers have ended. Must be called before
  // anything is served.
  void Start();
  void Stop();

  // Waits again, up to resume_timeout, for the client of a session that was resumed without
  // reaching its client.
  void AwaitResume(const OpenedSession& session);
  // Ends the sessions that wait for their clients and for which `filter` is true, soon.
  void EndSessionsIf(const SessionFilter& filter);

  // Plans that the next worker moves the pools that have quarantined memory to new memory: that of
  // a cache, or all (0). Then requests a restart. Returns the number of pools.
  //
  // Errors: kNotFound, and those of Store::PlanPoolMove
  //         kFailedPrecondition  there is no supervisor
  absl::StatusOr<uint32_t> MovePools(uint64_t cache_id);

 private:
  using Clock = std::chrono::steady_clock;  // wall time jumps
  struct Connection {
    kvstore::FileDescriptor socket;
    uint64_t session_number = 0;
    kvstore::OpenedPools pools;  // what the client may map
  };
  struct Waiting {
    Session session;
    Clock::time_point until;  // max = no limit, as one of its connections is open
  };

  void EndKeptSessions(kvstore::DescriptorKeeper* keeper);
  void ForgetMovedPools(kvstore::DescriptorKeeper* keeper) const;
  void EndQuarantines();
  void MoveHeldPools();
  void AdoptRings(const std::map<uint64_t, std::string>& tenants);
  void Restore();
  void DropOrphans(const std::set<std::string>& known);
  void Run();
  void Poll();
  bool HasEnded(const Connection& connection);
  void OnEnded(const std::string& name);
  void DropOverdue();
  Clock::time_point ResumeDeadline() const;

  const Parts parts_;
  const kvstore::FileDescriptor wake_;  // eventfd
  // By name; used by the thread only, once it runs.
  std::map<std::string, Connection> connections_;
  std::map<std::string, std::shared_ptr<const void>> rings_;  // by the name of their connection
  // When memory that is in quarantine then is moved; max = never.
  Clock::time_point move_at_ = Clock::time_point::max();
  kvstore::Mutex mutex_;
  std::map<std::string, Waiting> waiting_ ABSL_GUARDED_BY(mutex_);  // by token
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace pqcached::service

#endif  // PQCACHED_SERVICE_SESSION_DETACHED_SESSIONS_H_

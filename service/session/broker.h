// Broker opens sessions for clients on this host and sends them descriptors: of pools, of their
// control memory and of their staging ring (kvstore/read/broker_protocol.h).
//
// It listens on a unix socket next to gRPC's. Unlike gRPC, it learns the peer's uid from the
// kernel, so the uid can decide which tenant the client is. A connection is a session: when the
// connection ends, for whatever reason, the session ends. Descriptors that a client sends are
// dropped by the kernel unopened.
//
// The resources of a session outlive this process where there are keepers: control memory and
// connection are passed to the keepers before the client receives them.
//
// The broker has one thread, which waits for the keepers only: slow or silent peers have deadlines,
// and the cleanup after a session runs on the threads of Calls.
#ifndef PQCACHED_SERVICE_SESSION_BROKER_H_
#define PQCACHED_SERVICE_SESSION_BROKER_H_

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "kvstore/store.h"
#include "service/base/executor.h"
#include "service/config/config.h"
#include "service/session/detached_sessions.h"

namespace pqcached::service {

class Log;

// Returns the path of the broker's socket, given the path of gRPC's socket.
std::string BrokerPath(const std::string& socket_path);

class Broker {
 public:
  struct Parts {
    const Config& config;
    std::string boot_id;
    kvstore::Store& store;
    Sessions& sessions;
    Executor& cleanups;  // runs what is left to do when a session has ended
    Log& log;
    DetachedSessions& detached;
    SessionKeepers keepers;
    bool claimed = false;  // the supervisor holds the claim on the socket
  };

  // Starts serving before it returns; the parts must outlive the broker. Changes the umask of the
  // process for a moment.
  //
  // Errors: kAlreadyExists, kFailedPrecondition  as SocketClaim::Acquire; or cannot bind the socket
  static absl::StatusOr<std::unique_ptr<Broker>> Start(Parts parts, const std::string& socket_path);

  // Calls Shutdown.
  ~Broker();

  // Returns whether the broker's thread handles a task within `timeout`.
  bool IsResponsive(absl::Duration timeout);

  // Ends the sessions for which `filter` is true, and closes their connections. Waits at most
  // `timeout`.
  void EndSessionsIf(const SessionFilter& filter, absl::Duration timeout);

  // Stops accepting connections and ends all sessions, or leaves them to the next worker
  // (Sessions::LeaveToNextWorker). Clients observe this on their sockets, and in their control
  // memory once `cleanups` has run. Returns after the socket is removed.
  void Shutdown();

 private:
  class Impl;
  explicit Broker(std::shared_ptr<Impl> impl);

  const std::shared_ptr<Impl> impl_;
};

}  // namespace pqcached::service

#endif  // PQCACHED_SERVICE_SESSION_BROKER_H_

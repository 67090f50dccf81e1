// Broker opens sessions for clients on this host and hands them descriptors: of pools, of their
// control memory and their staging ring (kvstore/read/broker_protocol.h).
//
// It listens on a unix socket beside that of gRPC. There, unlike through gRPC, the kernel says who the
// peer is, so the peer's uid can decide which tenant it is. A connection is a session: its end, however
// it comes, ends the session. Descriptors that a client sends are dropped by the kernel unopened.
//
// What a session holds outlives this process where there are keepers: control memory and connection are
// kept before the client hears of them.
//
// One thread of its own, which waits for nobody but the keepers: peers that are slow or silent have deadlines, and what
// ends with a session ends on the threads of Calls.
#ifndef PQCACHED_SERVICE_BROKER_H_
#define PQCACHED_SERVICE_BROKER_H_

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "kvstore/store.h"
#include "service/calls.h"
#include "service/config.h"
#include "service/detached_sessions.h"

namespace pqcached::service {

class Log;

// The broker's socket, for the one of gRPC.
std::string BrokerPath(const std::string& socket_path);

class Broker {
 public:
  struct Parts {
    const Config& config;
    std::string boot_id;
    kvstore::Store& store;
    Sessions& sessions;
    Calls& calls;
    Log& log;
    DetachedSessions& detached;
    SessionKeepers keepers;
    bool claimed = false;  // somebody else has the right to serve on the socket, for this process
  };

  // Serves when it returns; the parts must outlive it. Changes the umask of the process for a moment.
  //
  // Errors: kAlreadyExists, kFailedPrecondition  as SocketClaim::Take, or the socket cannot be bound
  static absl::StatusOr<std::unique_ptr<Broker>> Start(Parts parts, const std::string& socket_path);

  // As Shutdown.
  ~Broker();

  // Whether its thread is at work. Waits for it, at most for `timeout`.
  bool Answers(absl::Duration timeout);

  // Takes no more connections and ends all sessions, or leaves them to the next worker (Sessions::Leave); their clients see it in their control memory,
  // when Calls has come to it, and on their sockets. Returns when the socket is removed.
  void Shutdown();

 private:
  class Impl;
  explicit Broker(std::shared_ptr<Impl> impl);

  const std::shared_ptr<Impl> impl_;
};

}  // namespace pqcached::service

#endif  // PQCACHED_SERVICE_BROKER_H_

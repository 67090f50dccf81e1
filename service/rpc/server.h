// Server is the gRPC server of one store: the services, standard health and reflection, on the
// endpoints of the configuration.
//
// Start and Shutdown must be called on one thread; requests are served on the server's own threads.
#ifndef PQCACHED_SERVICE_RPC_SERVER_H_
#define PQCACHED_SERVICE_RPC_SERVER_H_

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "kvstore/store.h"
#include "service/config/config.h"
#include "service/session/detached_sessions.h"

namespace grpc {
class Channel;
}  // namespace grpc

namespace pqcached::service {

class Log;

struct ServerOptions {
  bool claimed = false;  // the supervisor holds the claims on the sockets
  // Keepers, if any: sessions that are open at the end then continue in the next process.
  SessionKeepers keepers;
  // Asks the supervisor to replace this process by another one soon; empty: there is none.
  std::function<absl::Status()> request_restart = {};
};

class Server {
 public:
  // Starts serving before it returns. `store` and `log` must outlive the server.
  //
  // The umask of the process is changed while the sockets are bound: no other thread should create
  // files then.
  //
  // Errors: kAlreadyExists       another process serves on the socket
  //         kFailedPrecondition  an endpoint cannot be bound (the message names it)
  static absl::StatusOr<std::unique_ptr<Server>> Start(const Config& config, kvstore::Store& store,
                                                       Log& log, const ServerOptions& options = {});

  // Calls Shutdown.
  ~Server();

  // Returns the addresses to connect to: "unix:///run/pqcached/pqcached.sock", or "127.0.0.1:7070"
  // with the port that was bound.
  const std::vector<std::string>& endpoints() const;

  // Returns the id of this run of the server.
  const std::string& boot_id() const;

  // Returns whether calls are answered: by the broker, and by gRPC with a thread of calls. Waits at
  // most `timeout` for each, and for the store without limit. Must be called on one thread.
  bool IsResponsive(absl::Duration timeout);
  // Returns a channel to the services for callers in this process; it needs no socket.
  std::shared_ptr<grpc::Channel> InProcessChannel();

  // Refuses new calls, reports NOT_SERVING, and lets calls in flight end until shutdown_timeout.
  // Then ends the sessions (or leaves them to the next worker) and cancels the remaining calls.
  // Returns when no call is left and the sockets are removed.
  void Shutdown();

 private:
  class Impl;
  explicit Server(std::unique_ptr<Impl> impl);

  const std::unique_ptr<Impl> impl_;
};

}  // namespace pqcached::service

#endif  // PQCACHED_SERVICE_RPC_SERVER_H_

// Server is the gRPC server over one store: the services, standard health and reflection, on the
// endpoints of the configuration.
//
// Start and Shutdown belong to one thread; everything else runs by itself.
#ifndef PQCACHED_SERVICE_SERVER_H_
#define PQCACHED_SERVICE_SERVER_H_

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "kvstore/store.h"
#include "service/config.h"
#include "service/detached_sessions.h"

namespace grpc {
class Channel;
}  // namespace grpc

namespace pqcached::service {

class Log;

struct ServerOptions {
  bool claimed = false;  // whoever supervises this process has the right to serve on the sockets
  // Where there are any, sessions that are open at the end go on in the next process.
  SessionKeepers keepers;
};

class Server {
 public:
  // Serves when it returns. `store` and `log` must outlive the server.
  //
  // While it binds the socket, the umask of the process is changed: no other thread should make
  // files then.
  //
  // Errors: kAlreadyExists       another process serves on the socket
  //         kFailedPrecondition  an endpoint cannot be bound (names it)
  static absl::StatusOr<std::unique_ptr<Server>> Start(const Config& config, kvstore::Store& store,
                                                       Log& log, ServerOptions options = {});

  // As Shutdown.
  ~Server();

  // What to connect to: "unix:///run/pqcached/pqcached.sock", "127.0.0.1:7070" with the port that
  // was taken.
  const std::vector<std::string>& endpoints() const;

  // Names this run of the server.
  const std::string& boot_id() const;

  // Whether calls would be answered. Waits for the broker at most for `timeout`, and for the store.
  bool Answers(absl::Duration timeout);
  // To the services, for callers in this process: without a socket.
  std::shared_ptr<grpc::Channel> InProcessChannel();

  // Refuses new calls, says NOT_SERVING, lets calls at work end until shutdown_timeout, then ends
  // the sessions (or leaves them) and cancels what is left. Returns when no call is left and the socket is removed.
  void Shutdown();

 private:
  class Impl;
  explicit Server(std::unique_ptr<Impl> impl);

  const std::unique_ptr<Impl> impl_;
};

}  // namespace pqcached::service

#endif  // PQCACHED_SERVICE_SERVER_H_

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

namespace pqcached::service {

class Log;

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
                                                       Log& log);

  // As Shutdown.
  ~Server();

  // What to connect to: "unix:///run/pqcached/pqcached.sock", "127.0.0.1:7070" with the port that
  // was taken.
  const std::vector<std::string>& endpoints() const;

  // Refuses new calls, says NOT_SERVING, lets calls at work end until shutdown_timeout, then ends
  // the sessions and cancels what is left. Returns when no call is left and the socket is removed.
  void Shutdown();

 private:
  class Impl;
  explicit Server(std::unique_ptr<Impl> impl);

  const std::unique_ptr<Impl> impl_;
};

}  // namespace pqcached::service

#endif  // PQCACHED_SERVICE_SERVER_H_

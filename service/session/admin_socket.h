// AdminSocket accepts the connections of operators, on a unix socket of mode 0600 next to that of
// the clients, and passes them on. Unlike a listening port of gRPC, it learns the peer's uid from
// the kernel: the sidecar's own user and root are operators.
//
// Thread-safe.
#ifndef PQCACHED_SERVICE_SESSION_ADMIN_SOCKET_H_
#define PQCACHED_SERVICE_SESSION_ADMIN_SOCKET_H_

#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"

namespace pqcached::service {

class Log;

class AdminSocket {
 public:
  // Binds the socket, which must not exist. Changes the umask of the process for a moment.
  //
  // Errors: kFailedPrecondition  cannot bind the socket
  static absl::StatusOr<std::unique_ptr<AdminSocket>> Bind(const std::string& path, Log& log);

  // Calls Stop.
  ~AdminSocket();

  // Passes the descriptors of accepted connections, which do not block, to `take`, which owns them.
  // Called once; `take` is called on the socket's own thread, until Stop returns.
  void Serve(std::function<void(int descriptor)> take);
  // Accepts no further connections, and removes the socket. Connections that exist continue.
  void Stop();

  // Returns the process behind the last connection with this descriptor, "uid=0 pid=77". Empty when
  // there was none.
  std::string DescribePeer(int descriptor) const;

 private:
  class Impl;
  explicit AdminSocket(std::unique_ptr<Impl> impl);

  const std::unique_ptr<Impl> impl_;
};

}  // namespace pqcached::service

#endif  // PQCACHED_SERVICE_SESSION_ADMIN_SOCKET_H_

// Acceptor accepts the connections of one unix or TCP socket, limits them, and passes them on.
// Unlike a listening port of gRPC, it counts them, and receives the uid of a peer on a unix socket
// from the kernel.
//
// Thread-safe.
#ifndef PQCACHED_SERVICE_SESSION_ACCEPTOR_H_
#define PQCACHED_SERVICE_SESSION_ACCEPTOR_H_

#include <sys/types.h>

#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <string>

#include "absl/status/statusor.h"

namespace pqcached::service {

class Log;

class Acceptor {
 public:
  struct Options {
    std::string path = {};
    std::string tcp_address = {};  // instead of a path: "127.0.0.1:7070", port 0 = any free port
    mode_t mode = 0600;
    bool operators_only = false;  // only the sidecar's own user and root
    // Further connections are closed at once. Counted are those whose descriptor is still open.
    uint32_t max_connections = std::numeric_limits<uint32_t>::max();
    uint32_t max_connections_per_uid = std::numeric_limits<uint32_t>::max();
  };

  // Binds the socket, of which no file may exist. Changes the umask of the process for a moment.
  //
  // Errors: kFailedPrecondition  cannot bind the socket
  static absl::StatusOr<std::unique_ptr<Acceptor>> Bind(Options options, Log& log);

  // Calls Stop.
  ~Acceptor();

  // Passes the descriptors of accepted connections, which do not block, to `take`, which owns them.
  // Called once; `take` is called on the acceptor's own thread, until Stop returns.
  void Serve(std::function<void(int descriptor)> take);
  // Accepts no further connections, and removes the socket. Connections that exist continue.
  void Stop();

  // Returns the path, or the TCP address with the port that was bound.
  std::string address() const;

  // Returns the process behind the last connection with this descriptor, "uid=0 pid=77". Empty when
  // there was none.
  std::string DescribePeer(int descriptor) const;

 private:
  class Impl;
  explicit Acceptor(std::unique_ptr<Impl> impl);

  const std::unique_ptr<Impl> impl_;
};

}  // namespace pqcached::service

#endif  // PQCACHED_SERVICE_SESSION_ACCEPTOR_H_

// StatusSocket: a unix socket on which the supervisor answers each connection with one line,
// without reading anything, so that its state can be read when no worker serves:
//
//   $ socat - UNIX-CONNECT:/run/pqcached/pqcached.sock.status
//   {"state":"given_up","worker_pid":0,"starts":6,...}
//
// Single-thread.
#ifndef PQCACHED_SERVICE_SUPERVISE_STATUS_SOCKET_H_
#define PQCACHED_SERVICE_SUPERVISE_STATUS_SOCKET_H_

#include <memory>
#include <string>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "kvstore/local_session.h"

namespace pqcached::service {

class StatusSocket {
 public:
  // Binds the socket, to which only this user may connect, and replaces an existing one at `path`,
  // on which the caller must hold the claim.
  //
  // Errors: kFailedPrecondition  it cannot be bound
  static absl::StatusOr<std::unique_ptr<StatusSocket>> Bind(const std::string& path);
  // Removes the socket.
  ~StatusSocket();
  StatusSocket(const StatusSocket&) = delete;
  StatusSocket& operator=(const StatusSocket&) = delete;

  // Is readable when a connection waits.
  int descriptor() const { return socket_.get(); }

  // Accepts the connections that wait, then calls `line`, writes what it returns to each of them,
  // and closes them. Never blocks: a connection that cannot take the line at once gets none.
  void Answer(absl::FunctionRef<std::string()> line) const;

 private:
  StatusSocket(std::string path, kvstore::FileDescriptor socket)
      : path_(std::move(path)), socket_(std::move(socket)) {}

  const std::string path_;
  const kvstore::FileDescriptor socket_;
};

}  // namespace pqcached::service

#endif  // PQCACHED_SERVICE_SUPERVISE_STATUS_SOCKET_H_

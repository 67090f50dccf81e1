// SocketClaim is the exclusive right to serve on the path of a unix socket: one process holds it at
// a time.
//
// gRPC would replace the socket of a running daemon. A claim is a locked file next to the socket,
// which the kernel unlocks however its holder ends. Therefore the remains of a killed daemon are
// removed, and a second daemon is refused while the first one runs.
//
// Single-thread.
#ifndef PQCACHED_SERVICE_SUPERVISE_SOCKET_CLAIM_H_
#define PQCACHED_SERVICE_SUPERVISE_SOCKET_CLAIM_H_

#include <sys/stat.h>

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace pqcached::service {

// ScopedUmask sets the umask of the process and restores the previous one at its end.
class ScopedUmask {
 public:
  explicit ScopedUmask(mode_t mask) : previous_(umask(mask)) {}
  ~ScopedUmask() { umask(previous_); }
  ScopedUmask(const ScopedUmask&) = delete;
  ScopedUmask& operator=(const ScopedUmask&) = delete;

 private:
  const mode_t previous_;
};

class SocketClaim {
 public:
  // Creates the directory (mode 0700) if it is missing, and removes a socket on which no process
  // serves. Waits at most `timeout` for a process that serves without a claim to end: the worker
  // of a killed supervisor.
  //
  // Errors: kAlreadyExists       another process serves on the path
  //         kFailedPrecondition  the path is not a socket, or the directory cannot be created or
  //                              written
  static absl::StatusOr<std::unique_ptr<SocketClaim>> Acquire(
      const std::string& path, absl::Duration timeout = absl::ZeroDuration());

  // Removes the socket that a killed worker has left.
  //
  // REQUIRES: no process serves on it.
  void Clear() const;

  // Removes the socket and releases the claim.
  ~SocketClaim();
  SocketClaim(const SocketClaim&) = delete;
  SocketClaim& operator=(const SocketClaim&) = delete;

 private:
  SocketClaim(std::string path, int lock_descriptor);

  const std::string path_;
  const int lock_descriptor_;
};

}  // namespace pqcached::service

#endif  // PQCACHED_SERVICE_SUPERVISE_SOCKET_CLAIM_H_

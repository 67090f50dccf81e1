// SocketClaim is the right to serve on the path of a unix socket: one process at a time has it.
//
// gRPC would take over the path of a daemon that is alive. A claim is a locked file beside the
// socket, which the kernel unlocks however its holder ends, so what a killed daemon leaves behind
// is cleared away and a live one is refused.
//
// Single-thread.
#ifndef PQCACHED_SERVICE_SOCKET_CLAIM_H_
#define PQCACHED_SERVICE_SOCKET_CLAIM_H_

#include <sys/stat.h>

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace pqcached::service {

// Holds the mask under which this process makes files.
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
  // Makes the directory (mode 0700) when it is missing, and removes a socket that nobody serves. Waits
  // for as long as `patience` for the end of who serves without a claim: the worker of a supervisor
  // that was killed.
  //
  // Errors: kAlreadyExists       somebody serves there
  //         kFailedPrecondition  the path is not a socket, or the directory cannot be made or
  //         written
  static absl::StatusOr<std::unique_ptr<SocketClaim>> Take(
      const std::string& path, absl::Duration patience = absl::ZeroDuration());

  // Removes the socket, which a worker that was killed has left. REQUIRES: nobody serves there.
  void Clear() const;

  // Removes the socket and gives the claim back.
  ~SocketClaim();
  SocketClaim(const SocketClaim&) = delete;
  SocketClaim& operator=(const SocketClaim&) = delete;

 private:
  SocketClaim(std::string path, int lock_descriptor);

  const std::string path_;
  const int lock_descriptor_;
};

}  // namespace pqcached::service

#endif  // PQCACHED_SERVICE_SOCKET_CLAIM_H_

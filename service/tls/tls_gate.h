// TlsGate stands between accepted TCP connections and the server of calls: it makes their TLS
// handshakes, and passes on a plain socket for each connection whose client it has accepted.
//
// A *handshake* is a connection whose TLS handshake is not complete. Their number and duration are
// bounded, and they run on a thread of their own, so that clients which are connected notice
// nothing of those that never finish, or of many that come at once. Where there are too many, the
// oldest one of the address with the most is closed. Each refusal is in the log (`tls_refused`).
//
// Thread-safe.
#ifndef PQCACHED_SERVICE_TLS_TLS_GATE_H_
#define PQCACHED_SERVICE_TLS_TLS_GATE_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "service/base/log.h"
#include "service/session/identity.h"
#include "service/tls/tls_context.h"

namespace pqcached::service {

// The client of a TLS connection.
struct TlsClient {
  std::string address;                    // "10.0.0.7:40312"
  std::optional<Identity> identity = {};  // of its certificate, if it has shown one
};

class TlsGate {
 public:
  struct Options {
    TlsFiles files;
    // One identity may have three quarters of them, and one address without identities a quarter.
    uint32_t max_connections = 0;
    uint32_t max_handshakes = 0;
    absl::Duration handshake_timeout;
  };

  // `log` outlives the object.
  //
  // Errors: those of TlsContext::Load
  static absl::StatusOr<std::unique_ptr<TlsGate>> Make(Options options, const Log& log);

  // Closes all connections.
  ~TlsGate();

  // Passes a plain socket, which does not block, to `take`, which owns it, for each connection.
  // Called once; `take` is called on the gate's own thread, until StopHandshakes returns.
  void Serve(std::function<void(int descriptor)> take);

  // Begins the handshake of an accepted connection, whose descriptor does not block. Owns it.
  void Admit(int descriptor);

  // Closes handshakes, and begins no others. Other connections continue.
  void StopHandshakes();

  // Returns the client behind a plain socket by the name that the socket's peer has in gRPC; null
  // when the connection has ended. A name is never used twice, unlike a descriptor.
  std::shared_ptr<const TlsClient> ClientOf(absl::string_view peer) const;

 private:
  class Impl;
  explicit TlsGate(std::unique_ptr<Impl> impl);

  const std::unique_ptr<Impl> impl_;
};

}  // namespace pqcached::service

#endif  // PQCACHED_SERVICE_TLS_TLS_GATE_H_

// SocketServer: a listening socket, and the gRPC server that answers the calls which arrive there.
//
// Thread-safe, except for Start, Accept and the destructor.
#ifndef PQCACHED_SERVICE_RPC_SOCKET_SERVER_H_
#define PQCACHED_SERVICE_RPC_SOCKET_SERVER_H_

#include <grpcpp/grpcpp.h>

#include <memory>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "kvstore/clock.h"
#include "service/rpc/admin_service.h"
#include "service/rpc/kv_cache_service.h"
#include "service/session/acceptor.h"
#include "service/tls/tls_gate.h"

namespace pqcached::service {

class SocketServer {
 public:
  struct Options {
    Acceptor::Options socket;
    std::optional<TlsGate::Options> tls = std::nullopt;  // connections have to use TLS
    Door door = Door::kSocket;
    const grpc::ResourceQuota& messages;  // memory for messages in transmission
  };

  // What `parts` and `options` refer to outlives the server. The entrance of `parts` is not used.
  SocketServer(const KvCacheService::Parts& parts, Options options);
  // Cancels all calls.
  ~SocketServer();

  // Binds the socket. Errors: kFailedPrecondition  cannot bind the socket; those of TlsGate::Make
  absl::Status Start();
  // Serves connections. REQUIRES: started.
  void Accept();

  // Ends the session streams with `status`; see KvCacheService.
  void EndSessions(const absl::Status& status) { kv_cache_.EndSessions(status); }
  void EndSessionsIf(const SessionFilter& filter, const absl::Status& status) {
    kv_cache_.EndSessionsIf(filter, status);
  }

  // Sets what the health service of gRPC reports.
  void SetServing(bool serving);
  // Accepts no further connections, and removes the socket.
  void StopAccepting();
  // Cancels the calls that are left at `deadline`, and waits for their end.
  void Shutdown(kvstore::SteadyTime deadline);

  // Returns the path of the socket, or "127.0.0.1:7070". REQUIRES: started.
  std::string address() const { return socket_->address(); }
  grpc::Server& server() { return *server_; }

 private:
  Entrance MakeEntrance();
  void SetLimits(grpc::ServerBuilder& builder) const;

  const Options options_;
  const Config& config_;
  Log& log_;
  KvCacheService kv_cache_;
  AdminService admin_;
  std::unique_ptr<Acceptor> socket_;
  std::unique_ptr<TlsGate> tls_;  // null: connections are plain
  std::unique_ptr<grpc::experimental::ExternalConnectionAcceptor> tls_connections_;
  std::unique_ptr<grpc::Server> server_;
};

}  // namespace pqcached::service

#endif  // PQCACHED_SERVICE_RPC_SOCKET_SERVER_H_

#include "service/rpc/socket_server.h"

#include <grpcpp/health_check_service_interface.h>
#include <grpcpp/resource_quota.h>
#include <grpcpp/server_posix.h>

#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "kernels/base/status_macros.h"
#include "service/base/log.h"
#include "service/base/refusal.h"
#include "service/rpc/grpc_status.h"

namespace pqcached::service {
namespace {

// Room for the framing of a message whose tensor alone fills max_message_bytes.
constexpr int kFramingBytes = 64 << 10;

// Number of calls that one connection may have open; further calls wait in the client.
constexpr int kMaxConcurrentStreams = 256;

// Keepalive detects a TCP client that vanished without closing its connection; the end of a unix
// socket is noticed at once. The timeout is long because it applies to unix sockets too: an engine
// that is stopped in a debugger must keep its session.
constexpr int kKeepaliveMilliseconds = 60'000;
constexpr int kKeepaliveTimeoutMilliseconds = 10 * 60'000;

// Clients may connect without a token. A connection without a call ends after this time, and gRPC
// makes another one when a client needs it.
constexpr int kMaxIdleMilliseconds = 5 * 60'000;

KvCacheService::Parts WithEntrance(const KvCacheService::Parts& parts, Entrance entrance) {
  return {parts.config, parts.boot_id, parts.handlers,     parts.stats,
          parts.calls,  parts.log,     std::move(entrance)};
}

}  // namespace

SocketServer::SocketServer(const KvCacheService::Parts& parts, Options options)
    : options_(std::move(options)),
      config_(parts.config),
      log_(parts.log),
      kv_cache_(WithEntrance(parts, MakeEntrance())),
      admin_(parts.handlers.admin, parts.calls, MakeEntrance()) {}

SocketServer::~SocketServer() {
  StopAccepting();
  if (server_ != nullptr) Shutdown(kvstore::SteadyTime::Now());
}

absl::Status SocketServer::Start() {
  ASSIGN_OR_RETURN(socket_, Acceptor::Bind(options_.socket, log_));
  grpc::ServerBuilder builder;
  builder.RegisterService(&kv_cache_);
  builder.RegisterService(&admin_);
  SetLimits(builder);
  if (options_.tls.has_value()) {
    ASSIGN_OR_RETURN(tls_, TlsGate::Make(*options_.tls, log_));
    // Unlike AddInsecureChannelFromFd it names a connection by its peer, and a name does not return
    // as a descriptor does: no call can be taken for one of a later connection.
    tls_connections_ = builder.experimental().AddExternalConnectionAcceptor(
        grpc::ServerBuilder::experimental_type::ExternalConnectionType::FROM_FD,
        grpc::InsecureServerCredentials());
    // A client that sends nothing after its handshake.
    builder.AddChannelArgument(
        GRPC_ARG_SERVER_HANDSHAKE_TIMEOUT_MS,
        static_cast<int>(absl::ToInt64Milliseconds(options_.tls->handshake_timeout)));
    if (!config_.token_file.empty()) {
      builder.AddChannelArgument(GRPC_ARG_MAX_CONNECTION_IDLE_MS, kMaxIdleMilliseconds);
    }
  }
  server_ = builder.BuildAndStart();
  if (server_ == nullptr) {
    return FailedPrecondition("", absl::StrCat("cannot start the server of ", address()));
  }
  return absl::OkStatus();
}

void SocketServer::Accept() {
  if (tls_ != nullptr) {
    tls_->Serve([this](int descriptor) {
      grpc::experimental::ExternalConnectionAcceptor::NewConnectionParameters connection;
      connection.fd = descriptor;  // gRPC owns it
      tls_connections_->HandleNewConnection(&connection);
    });
    return socket_->Serve([this](int descriptor) { tls_->Admit(descriptor); });
  }
  socket_->Serve([this](int descriptor) {
    grpc::AddInsecureChannelFromFd(server_.get(), descriptor);  // owns it
  });
}

void SocketServer::SetServing(bool serving) {
  grpc::HealthCheckServiceInterface* health = server_->GetHealthCheckService();
  if (health == nullptr) return;
  health->SetServingStatus(serving);
  for (const char* service : {"pqcached.v1.KvCache", "pqcached.v1.Admin"}) {
    health->SetServingStatus(service, serving);
  }
}

void SocketServer::StopAccepting() {
  if (socket_ != nullptr) socket_->Stop();
  if (tls_ != nullptr) tls_->StopHandshakes();
}

void SocketServer::Shutdown(kvstore::SteadyTime deadline) {
  server_->Shutdown(ToGrpc(deadline));
  server_->Wait();
}

Entrance SocketServer::MakeEntrance() {
  return {.door = options_.door,
          .describe_peer =
              [this](const std::string& peer) {
                // gRPC's name of a connection that it has not accepted itself.
                int descriptor = -1;
                if (!absl::SimpleAtoi(absl::StripPrefix(peer, "fd:"), &descriptor)) return peer;
                return socket_->DescribePeer(descriptor);
              },
          .client_of = [this](const std::string& peer) { return tls_->ClientOf(peer); }};
}

void SocketServer::SetLimits(grpc::ServerBuilder& builder) const {
  builder.SetMaxReceiveMessageSize(static_cast<int>(config_.max_message_bytes) + kFramingBytes);
  builder.SetMaxSendMessageSize(static_cast<int>(config_.max_message_bytes) + kFramingBytes);
  builder.SetResourceQuota(options_.messages);
  builder.AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, kMaxConcurrentStreams);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIME_MS, kKeepaliveMilliseconds);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, kKeepaliveTimeoutMilliseconds);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
}

}  // namespace pqcached::service

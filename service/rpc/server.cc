#include "service/rpc/server.h"

#include <grpc/grpc.h>
#include <grpcpp/ext/proto_server_reflection_plugin.h>
#include <grpcpp/grpcpp.h>
#include <grpcpp/health_check_service_interface.h>
#include <grpcpp/resource_quota.h>
#include <grpcpp/server_posix.h>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "kernels/base/status_macros.h"
#include "kvstore/clock.h"
#include "service/base/log.h"
#include "service/base/refusal.h"
#include "service/handlers/handlers.h"
#include "service/rpc/admin_service.h"
#include "service/rpc/grpc_status.h"
#include "service/rpc/kv_cache_service.h"
#include "service/session/acceptor.h"
#include "service/session/broker.h"
#include "service/supervise/socket_claim.h"
#include "service/wire/wire.h"

namespace pqcached::service {
namespace {

using kvstore::SteadyTime;

constexpr size_t kBootIdBytes = 8;

// Memory for messages of operators, so that clients which use all of theirs do not shut them out.
constexpr size_t kOperatorMemoryBytes = size_t{16} << 20;

// Room for the framing of a message whose tensor alone fills max_message_bytes.
constexpr int kFramingBytes = 64 << 10;

// Number of calls that one connection may have open; further calls wait in the client.
constexpr int kMaxConcurrentStreams = 256;

// Keepalive detects a TCP client that vanished without closing its connection; the end of a unix
// socket is noticed at once. The timeout is long because it applies to unix sockets too: an engine
// that is stopped in a debugger must keep its session.
constexpr int kKeepaliveMilliseconds = 60'000;
constexpr int kKeepaliveTimeoutMilliseconds = 10 * 60'000;

// Time that cancelled calls get to notice their cancellation, after shutdown_timeout.
constexpr absl::Duration kCancelGrace = absl::Milliseconds(200);

}  // namespace

class Server::Impl {
 public:
  Impl(const Config& config, kvstore::Store& store, Log& log, const ServerOptions& options)
      : config_(config),
        options_(options),
        store_(store),
        log_(log),
        limits_(config),
        sessions_(config.max_sessions, &limits_),
        gate_(config, boot_id_, sessions_, stats_, log),
        calls_(config, limits_, gate_),
        detached_({config_, store, sessions_, calls_.serving(), log, options.keepers,
                   options.request_restart}),
        handlers_({config_, boot_id_, store, sessions_, limits_, detached_, stats_, gate_, log,
                   [this](bool serving) { SetServing(serving); },
                   [this](const SessionFilter& filter) { EndSessionsIf(filter); },
                   [this](const std::string& tenant) { return CountWork(tenant); }}),
        kv_cache_({config_, boot_id_, handlers_, stats_, calls_, log}),
        admin_(handlers_.admin, calls_, {}),
        operator_kv_cache_({config_, boot_id_, handlers_, stats_, calls_, log, OperatorEntrance()}),
        operator_admin_(handlers_.admin, calls_, OperatorEntrance()) {}

  absl::Status Start() {
    const std::string path = SocketPath(config_);
    if (!options_.claimed) {
      ASSIGN_OR_RETURN(std::unique_ptr<SocketClaim> claim, SocketClaim::Acquire(path));
      claim_ = std::move(claim);
      ASSIGN_OR_RETURN(std::unique_ptr<SocketClaim> admin_claim,
                       SocketClaim::Acquire(AdminPath(config_)));
      admin_claim_ = std::move(admin_claim);
    }
    store_.SetTenantQuotas(limits_.Quotas());
    detached_.Start();

    // Never paired with grpc_shutdown: when the last user of gRPC releases it, gRPC may wait 10 s
    // for one of its own pollers.
    grpc_init();
    grpc::EnableDefaultHealthCheckService(true);
    grpc::reflection::InitProtoReflectionServerBuilderPlugin();
    if (config_.broker) {  // started first, so that clients of gRPC's socket find it
      ASSIGN_OR_RETURN(auto broker,
                       Broker::Start({config_, boot_id_, store_, sessions_, calls_.serving(), log_,
                                      detached_, options_.keepers, options_.claimed},
                                     path));
      broker_ = std::move(broker);
    }
    if (absl::Status status = StartServers(); !status.ok()) {
      broker_.reset();
      return status;
    }
    SetServing(true);
    return absl::OkStatus();
  }

  void Shutdown() {
    if (server_ == nullptr) return;
    SetServing(false);
    if (options_.keepers.memory != nullptr) sessions_.LeaveToNextWorker();
    gate_.Drain(SteadyTime::Now() + config_.shutdown_timeout);
    kv_cache_.EndSessions(Unavailable("", "the sidecar is shutting down", kRetryMemory));
    broker_.reset();
    for (const auto& acceptor : {client_socket_.get(), admin_socket_.get()}) {
      if (acceptor != nullptr) acceptor->Stop();
    }
    for (grpc::Server* server : Servers()) {
      server->Shutdown(ToGrpc(SteadyTime::Now() + kCancelGrace));
      server->Wait();
    }
    detached_.Stop();
    calls_.Stop();
    operator_server_.reset();
    server_.reset();
    client_socket_.reset();
    admin_socket_.reset();
    admin_claim_.reset();
    claim_.reset();
  }

  const std::vector<std::string>& endpoints() const { return endpoints_; }
  const std::string& boot_id() const { return boot_id_; }

  bool IsResponsive(absl::Duration timeout) {
    store_.ListCaches("");
    return (broker_ == nullptr || broker_->IsResponsive(timeout)) && AnswersItself(timeout);
  }

  grpc::Server& server() { return *server_; }

 private:
  // Calls the server as a client does, so that the acceptor, gRPC and a thread of calls take part.
  // Any answer counts, a refusal too.
  bool AnswersItself(absl::Duration timeout) {
    if (probe_ == nullptr) {
      probe_ = v1::Admin::NewStub(
          grpc::CreateChannel(config_.listen, grpc::InsecureChannelCredentials()));
    }
    grpc::ClientContext context;
    context.set_deadline(ToGrpc(SteadyTime::Now() + timeout));
    v1::GetServerInfoResponse ignored;
    return probe_->GetServerInfo(&context, {}, &ignored).error_code() !=
           grpc::StatusCode::DEADLINE_EXCEEDED;
  }

  absl::Status StartServers() {
    ASSIGN_OR_RETURN(
        admin_socket_,
        Acceptor::Bind({.path = AdminPath(config_), .mode = 0600, .operators_only = true}, log_));
    ASSIGN_OR_RETURN(client_socket_,
                     Acceptor::Bind({.path = SocketPath(config_),
                                     .mode = config_.socket_mode,
                                     .max_connections = config_.max_connections,
                                     .max_connections_per_uid = config_.max_connections / 4 * 3},
                                    log_));
    RETURN_IF_ERROR(StartClientServer());
    return StartOperatorServer();
  }

  absl::Status StartClientServer() {
    grpc::ServerBuilder builder;
    int tcp_port = 0;
    if (!config_.tcp_listen.empty()) {
      builder.AddListeningPort(config_.tcp_listen, grpc::InsecureServerCredentials(), &tcp_port);
    }
    builder.RegisterService(&kv_cache_);
    builder.RegisterService(&admin_);
    SetLimits(builder, RequestMemoryBytesOf(config_));
    server_ = builder.BuildAndStart();
    if (server_ == nullptr) {
      return FailedPrecondition("", config_.tcp_listen.empty()
                                        ? "cannot start the server of clients"
                                        : absl::StrCat("cannot listen on ", config_.tcp_listen));
    }
    client_socket_->Serve([this](int descriptor) {
      grpc::AddInsecureChannelFromFd(server_.get(), descriptor);  // owns it
    });
    endpoints_.push_back(config_.listen);
    if (!config_.tcp_listen.empty()) {
      endpoints_.push_back(
          absl::StrCat(config_.tcp_listen.substr(0, config_.tcp_listen.rfind(':')), ":", tcp_port));
    }
    return absl::OkStatus();
  }

  absl::Status StartOperatorServer() {
    grpc::ServerBuilder builder;
    builder.RegisterService(&operator_kv_cache_);
    builder.RegisterService(&operator_admin_);
    SetLimits(builder, kOperatorMemoryBytes);
    operator_server_ = builder.BuildAndStart();
    if (operator_server_ == nullptr) {
      return FailedPrecondition("", "cannot start the server of the admin socket");
    }
    admin_socket_->Serve([this](int descriptor) {
      grpc::AddInsecureChannelFromFd(operator_server_.get(), descriptor);  // owns it
    });
    return absl::OkStatus();
  }

  void SetLimits(grpc::ServerBuilder& builder, size_t memory_bytes) const {
    builder.SetMaxReceiveMessageSize(static_cast<int>(config_.max_message_bytes) + kFramingBytes);
    builder.SetMaxSendMessageSize(static_cast<int>(config_.max_message_bytes) + kFramingBytes);
    grpc::ResourceQuota quota("pqcached");
    quota.Resize(memory_bytes);
    builder.SetResourceQuota(quota);
    builder.AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, kMaxConcurrentStreams);
    builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
    builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIME_MS, kKeepaliveMilliseconds);
    builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, kKeepaliveTimeoutMilliseconds);
    builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  }

  Entrance OperatorEntrance() {
    return {.admin = true, .describe_peer = [this](const std::string& peer) {
              // gRPC's name of a connection that it has not accepted itself.
              int descriptor = -1;
              if (!absl::SimpleAtoi(absl::StripPrefix(peer, "fd:"), &descriptor)) return peer;
              return admin_socket_->DescribePeer(descriptor);
            }};
  }

  void EndSessionsIf(const SessionFilter& filter) {
    kv_cache_.EndSessionsIf(filter, Unavailable("", "the session was ended", kNoRetry));
    if (broker_ != nullptr) broker_->EndSessionsIf(filter, config_.default_timeout);
    detached_.EndSessionsIf(filter);
  }

  WorkCounts CountWork(const std::string& tenant) const {
    const auto [waiting_calls, running_calls] = calls_.CountCalls(tenant);
    const auto [waiting_builds, running_builds] = calls_.CountBuilds(tenant);
    return {.waiting_calls = waiting_calls + waiting_builds,
            .running_calls = running_calls,
            .running_builds = running_builds};
  }

  void SetServing(bool serving) {
    for (grpc::Server* server : Servers()) {
      grpc::HealthCheckServiceInterface* health = server->GetHealthCheckService();
      if (health == nullptr) continue;
      health->SetServingStatus(serving);
      for (const char* service : {"pqcached.v1.KvCache", "pqcached.v1.Admin"}) {
        health->SetServingStatus(service, serving);
      }
    }
  }

  // Returns the servers that have started.
  std::vector<grpc::Server*> Servers() const {
    std::vector<grpc::Server*> servers;
    for (grpc::Server* server : {server_.get(), operator_server_.get()}) {
      if (server != nullptr) servers.push_back(server);
    }
    return servers;
  }

  const Config config_;
  const ServerOptions options_;
  const std::string boot_id_ = RandomHex(kBootIdBytes);
  kvstore::Store& store_;
  Log& log_;
  std::unique_ptr<SocketClaim> claim_;
  std::unique_ptr<SocketClaim> admin_claim_;
  RpcStats stats_;
  TenantLimitTable limits_;
  Sessions sessions_;
  CallGate gate_;
  Calls calls_;
  DetachedSessions detached_;
  Handlers handlers_;
  KvCacheService kv_cache_;
  AdminService admin_;
  KvCacheService operator_kv_cache_;  // a gRPC service belongs to one server
  AdminService operator_admin_;
  std::unique_ptr<Acceptor> client_socket_;
  std::unique_ptr<Acceptor> admin_socket_;
  std::unique_ptr<Broker> broker_;
  std::unique_ptr<grpc::Server> server_;           // for clients
  std::unique_ptr<grpc::Server> operator_server_;  // for the admin socket
  std::vector<std::string> endpoints_;
  std::unique_ptr<v1::Admin::Stub> probe_;  // used by IsResponsive only
};

absl::StatusOr<std::unique_ptr<Server>> Server::Start(const Config& config, kvstore::Store& store,
                                                      Log& log, ServerOptions options) {
  auto impl = std::make_unique<Impl>(config, store, log, options);
  RETURN_IF_ERROR(impl->Start());
  return std::unique_ptr<Server>(new Server(std::move(impl)));
}

Server::Server(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

Server::~Server() { Shutdown(); }

const std::vector<std::string>& Server::endpoints() const { return impl_->endpoints(); }

const std::string& Server::boot_id() const { return impl_->boot_id(); }

bool Server::IsResponsive(absl::Duration timeout) { return impl_->IsResponsive(timeout); }

std::shared_ptr<grpc::Channel> Server::InProcessChannel() {
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(-1);
  return impl_->server().InProcessChannel(arguments);
}

void Server::Shutdown() { impl_->Shutdown(); }

}  // namespace pqcached::service

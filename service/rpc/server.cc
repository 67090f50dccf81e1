#include "service/rpc/server.h"

#include <grpc/grpc.h>
#include <grpcpp/ext/proto_server_reflection_plugin.h>
#include <grpcpp/grpcpp.h>
#include <grpcpp/health_check_service_interface.h>
#include <grpcpp/resource_quota.h>

#include <algorithm>
#include <utility>

#include "kernels/base/status_macros.h"
#include "kvstore/clock.h"
#include "service/base/log.h"
#include "service/base/refusal.h"
#include "service/handlers/handlers.h"
#include "service/rpc/grpc_status.h"
#include "service/rpc/socket_server.h"
#include "service/session/broker.h"
#include "service/supervise/socket_claim.h"
#include "service/wire/wire.h"

namespace pqcached::service {
namespace {

using kvstore::SteadyTime;

constexpr size_t kBootIdBytes = 8;

// Memory for messages of operators, so that clients which use all of theirs do not shut them out.
constexpr size_t kOperatorMemoryBytes = size_t{16} << 20;

// Clients with TLS have this part of the memory for messages, at least one message, because the
// sidecar has not checked their tokens when they send one.
constexpr size_t kTlsMemoryShare = 4;

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
        parts_({config_, boot_id_, handlers_, stats_, calls_, log}) {
    const size_t request_bytes = RequestMemoryBytesOf(config_);
    const size_t tls_bytes = std::max(request_bytes / kTlsMemoryShare, config_.max_message_bytes);
    client_messages_.Resize(UsesTls(config_)
                                ? std::max(request_bytes - tls_bytes, config_.max_message_bytes)
                                : request_bytes);
    tls_messages_.Resize(tls_bytes);
    operator_messages_.Resize(kOperatorMemoryBytes);
  }

  absl::Status Start() {
    const std::string path = SocketPath(config_);
    if (!options_.claimed) {
      ASSIGN_OR_RETURN(std::unique_ptr<SocketClaim> claim, SocketClaim::Acquire(path));
      claim_ = std::move(claim);
      ASSIGN_OR_RETURN(std::unique_ptr<SocketClaim> admin_claim,
                       SocketClaim::Acquire(AdminPath(config_)));
      admin_claim_ = std::move(admin_claim);
    }
    if (!config_.token_file.empty()) {
      ASSIGN_OR_RETURN(tokens_, TokenFile::Open(config_.token_file, log_));
      gate_.SetTokens(tokens_.get());
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
      servers_.clear();
      return status;
    }
    SetServing(true);
    return absl::OkStatus();
  }

  void Shutdown() {
    if (servers_.empty()) return;
    SetServing(false);
    if (options_.keepers.memory != nullptr) sessions_.LeaveToNextWorker();
    gate_.Drain(SteadyTime::Now() + config_.shutdown_timeout);
    for (const auto& server : servers_) {
      server->EndSessions(Unavailable("", "the sidecar is shutting down", kRetryMemory));
    }
    broker_.reset();
    for (const auto& server : servers_) server->StopAccepting();
    for (const auto& server : servers_) server->Shutdown(SteadyTime::Now() + kCancelGrace);
    detached_.Stop();
    calls_.Stop();
    servers_.clear();
    admin_claim_.reset();
    claim_.reset();
  }

  const std::vector<std::string>& endpoints() const { return endpoints_; }
  const std::string& boot_id() const { return boot_id_; }

  bool IsResponsive(absl::Duration timeout) {
    store_.ListCaches("");
    return (broker_ == nullptr || broker_->IsResponsive(timeout)) && AnswersItself(timeout);
  }

  grpc::Server& server() { return servers_.front()->server(); }

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

  // The server of clients is the first one. No call arrives before all have started.
  absl::Status StartServers() {
    const uint32_t most = config_.max_connections;
    AddServer({.socket = {.path = SocketPath(config_),
                          .mode = config_.socket_mode,
                          .max_connections = most,
                          .max_connections_per_uid = most / 4 * 3},
               .messages = client_messages_});
    AddServer({.socket = {.path = AdminPath(config_), .operators_only = true},
               .door = Door::kAdminSocket,
               .messages = operator_messages_});
    if (!config_.tcp_listen.empty()) AddTcpServer();
    for (const auto& server : servers_) RETURN_IF_ERROR(server->Start());
    endpoints_.push_back(config_.listen);
    if (!config_.tcp_listen.empty()) endpoints_.push_back(servers_.back()->address());
    for (const auto& server : servers_) server->Accept();
    return absl::OkStatus();
  }

  void AddTcpServer() {
    const uint32_t most = TcpConnectionsOf(config_);
    if (!UsesTls(config_)) {
      return AddServer({.socket = {.tcp_address = config_.tcp_listen, .max_connections = most},
                        .door = Door::kTcp,
                        .messages = client_messages_});
    }
    AddServer(
        {.socket = {.tcp_address = config_.tcp_listen},
         .tls = TlsGate::Options{.files = {.certificate = config_.tls_certificate,
                                           .key = config_.tls_key,
                                           .client_ca = config_.tls_client_ca,
                                           .certificate_required = config_.token_file.empty()},
                                 .max_connections = most,
                                 .max_handshakes = config_.max_handshakes,
                                 .handshake_timeout = config_.handshake_timeout},
         .door = Door::kTls,
         .messages = tls_messages_});
  }

  void AddServer(const SocketServer::Options& options) {
    servers_.push_back(std::make_unique<SocketServer>(parts_, options));
  }

  void EndSessionsIf(const SessionFilter& filter) {
    const absl::Status ended = Unavailable("", "the session was ended", kNoRetry);
    for (const auto& server : servers_) server->EndSessionsIf(filter, ended);
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
    for (const auto& server : servers_) server->SetServing(serving);
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
  std::unique_ptr<TokenFile> tokens_;  // null: clients have none
  CallGate gate_;
  Calls calls_;
  DetachedSessions detached_;
  Handlers handlers_;
  const KvCacheService::Parts parts_;
  grpc::ResourceQuota client_messages_{"clients"};
  grpc::ResourceQuota tls_messages_{"tls"};
  grpc::ResourceQuota operator_messages_{"operators"};
  std::unique_ptr<Broker> broker_;
  std::vector<std::unique_ptr<SocketServer>> servers_;
  std::vector<std::string> endpoints_;
  std::unique_ptr<v1::Admin::Stub> probe_;  // used by IsResponsive only
};

absl::StatusOr<std::unique_ptr<Server>> Server::Start(const Config& config, kvstore::Store& store,
                                                      Log& log, const ServerOptions& options) {
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

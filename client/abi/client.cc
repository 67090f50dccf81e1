// Opens and closes clients, and passes Admin calls of tools.
#include <errno.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "client/abi/rpc_library.h"
#include "client/base/arguments.h"
#include "client/base/call_log.h"
#include "client/base/error.h"
#include "client/local/broker.h"
#include "client/local/session.h"
#include "client/step/handles.h"
#include "kernels/base/status_macros.h"

namespace pqcached::client {
namespace {

constexpr uint32_t kDefaultTimeoutMs = 10000;
constexpr size_t kMaxTenantBytes = 64;
constexpr size_t kMaxClientNameBytes = 128;
constexpr char kAdminSuffix[] = ".admin";
constexpr uint64_t kStagingUnitBytes = uint64_t{1} << 20;
constexpr uint32_t kSetClientVersionVersion = 15;  // of Remote
constexpr uint32_t kSecuredVersion = 22;           // of RpcEntry

// Returns the path of a unix socket; empty for other endpoints and abstract sockets.
std::string SocketPath(std::string_view endpoint) {
  constexpr std::string_view kUnix = "unix:";
  if (!endpoint.starts_with(kUnix)) return {};
  endpoint.remove_prefix(kUnix.size());
  if (endpoint.starts_with("//")) endpoint.remove_prefix(2);
  return std::string(endpoint);
}

// Implements LocalHost by the broker and the RPCs.
class SidecarHost final : public LocalHost {
 public:
  // The remote outlives the object: LocalSession begins no call after it is closed.
  SidecarHost(std::unique_ptr<Broker> broker, Remote& remote)
      : broker_(std::move(broker)), remote_(remote) {}

  pqc_status OpenPool(uint64_t cache_id, std::shared_ptr<Mapping>* pool) override {
    return broker_->OpenPool(cache_id, pool);
  }
  pqc_status HoldPool(uint64_t cache_id) override { return broker_->HoldPool(cache_id); }
  pqc_status OpenStaging(uint64_t slot_bytes, uint32_t slot_count,
                         std::shared_ptr<Mapping>* ring) override {
    return broker_->OpenStaging(slot_bytes, slot_count, ring);
  }
  pqc_status Attach(uint64_t sequence_id, const LeaseView& lease, AttachAnswer* answer) override {
    RefusalBuffer error;
    const pqc_status status = remote_.Attach(sequence_id, lease, &answer->lease_id,
                                             &answer->word_index, answer->image.sink(), &error);
    return Report(status, error);
  }
  pqc_status Detach(const LeaseView& lease) override {
    RefusalBuffer error;
    return Report(remote_.Detach(lease, &error), error);
  }
  void End() override { broker_->End(); }
  bool WaitEnded(uint32_t wait_ms) override { return broker_->WaitEnded(wait_ms); }
  bool HoldsConnection() override { return broker_->HoldsConnection(); }
  void Abandon() override { broker_->Abandon(); }

 private:
  const std::unique_ptr<Broker> broker_;
  Remote& remote_;
};

bool IsLoopback(std::string_view host_port) {
  const size_t colon = host_port.rfind(':');
  if (colon == std::string_view::npos) return false;
  const std::string_view host = host_port.substr(0, colon);
  return host == "localhost" || host == "[::1]" || host.starts_with("127.");
}

pqc_status CheckEndpoint(const char* endpoint, bool secured) {
  if (!endpoint) return Fail(PQC_INVALID_ARGUMENT, "options.endpoint", "must not be NULL");
  const std::string_view view = endpoint;
  if (view.starts_with("unix:")) {
    if (secured) {
      return Fail(PQC_INVALID_ARGUMENT, "options.tls_ca", "\"%s\" is a unix socket, without TLS",
                  endpoint);
    }
    if (view.size() > std::strlen("unix:")) return PQC_OK;
  } else if (const size_t colon = view.rfind(':');
             colon != std::string_view::npos && colon > 0 && colon + 1 < view.size()) {
    if (secured || IsLoopback(view)) return PQC_OK;
    return Fail(PQC_INVALID_ARGUMENT, "options.endpoint",
                "\"%s\" is not on the loopback: it needs options.tls_ca", endpoint);
  }
  return Fail(PQC_INVALID_ARGUMENT, "options.endpoint", "\"%s\", must be unix:///path or host:port",
              endpoint);
}

// Returns the options for TLS, which make no sense one without the other.
pqc_status ReadSecurity(const pqc_client_options& options, SecurityOptions* security) {
  *security = {.tls_ca = options.tls_ca,
               .tls_certificate = options.tls_certificate,
               .tls_key = options.tls_key,
               .tls_server_name = options.tls_server_name,
               .token_file = options.token_file};
  if ((options.tls_certificate == nullptr) != (options.tls_key == nullptr)) {
    return Fail(PQC_INVALID_ARGUMENT, "options.tls_key",
                "tls_certificate and tls_key must both be given, or none");
  }
  if (options.tls_ca != nullptr) return PQC_OK;
  for (const auto& [field, value] : {std::pair("options.tls_certificate", options.tls_certificate),
                                     std::pair("options.tls_server_name", options.tls_server_name),
                                     std::pair("options.token_file", options.token_file)}) {
    if (value != nullptr) return Fail(PQC_INVALID_ARGUMENT, field, "needs options.tls_ca");
  }
  return PQC_OK;
}

pqc_status CheckTenant(const char* tenant) {
  const std::string_view view = tenant;
  const bool allowed =
      view.find_first_not_of("abcdefghijklmnopqrstuvwxyz0123456789_.-") == std::string_view::npos;
  if (!view.empty() && view.size() <= kMaxTenantBytes && allowed) return PQC_OK;
  return Fail(PQC_INVALID_ARGUMENT, "options.tenant", "must be 1 to %zu bytes of [a-z0-9_.-]",
              kMaxTenantBytes);
}

pqc_status CheckPath(const pqc_client_options& options) {
  if (const uint32_t path = RawEnum(options.path); path > PQC_PATH_ADMIN) {
    return Fail(PQC_INVALID_ARGUMENT, "options.path", "%u is unknown", path);
  }
  if ((options.staging_slot_bytes == 0) != (options.staging_slot_count == 0)) {
    return Fail(PQC_INVALID_ARGUMENT, "options.staging_slot_bytes", "both or none must be 0");
  }
  if (options.staging_slot_bytes % kStagingUnitBytes != 0) {
    return Fail(PQC_INVALID_ARGUMENT, "options.staging_slot_bytes",
                "%llu, must be a multiple of 1 MiB",
                static_cast<unsigned long long>(options.staging_slot_bytes));
  }
  return PQC_OK;
}

pqc_status OpenRemote(const RemoteOptions& options, const SecurityOptions& security,
                      const RpcEntry& entry, ClientState& state) {
  if (security.tls_ca != nullptr && entry.remote_version < kSecuredVersion) {
    return Fail(PQC_UNIMPLEMENTED, "options.tls_ca",
                "libpqcached_rpc is older than this library, and has no TLS");
  }
  Remote* remote = nullptr;
  RefusalBuffer error;
  const pqc_status opened = security.tls_ca != nullptr
                                ? entry.open_secured(options, security, &remote, &error)
                                : entry.open(options, &remote, &error);
  const pqc_status status = Report(opened, error,
                                   {{"open.tenant", "options.tenant"},
                                    {"open.client_name", "options.client_name"},
                                    {"authorization", "options.token_file"}});
  state.remote.reset(remote);
  state.remote_version = entry.remote_version;
  if (remote && entry.remote_version >= kSetClientVersionVersion) {
    remote->SetClientVersion(kRemoteVersion);
  }
  return status;
}

// Opens a broker connection and fills in *parts, except the host.
pqc_status Connect(const BrokerOptions& options, std::unique_ptr<Broker>* broker,
                   LocalLink::Parts* parts) {
  RETURN_IF_ERROR(Broker::Open(options, broker, &parts->control));
  parts->boot_word = (*broker)->hello().boot_word;
  return PQC_OK;
}

// Opens a session at the broker; gRPC uses the same session.
pqc_status OpenLocal(const pqc_client_options& options, const RemoteOptions& remote_options,
                     const RpcEntry& entry, ClientState& state) {
  BrokerOptions broker_options{.socket_path = SocketPath(options.endpoint),
                               .tenant = options.tenant ? options.tenant : "",
                               .client_name = remote_options.client_name,
                               .timeout_ms = remote_options.timeout_ms};
  if (broker_options.socket_path.empty()) {
    return SetRetry(kRetryMemory,
                    Fail(PQC_UNAVAILABLE, "options.path", "only a unix: endpoint has a broker"));
  }
  std::unique_ptr<Broker> broker;
  LocalLink::Parts parts;
  RETURN_IF_ERROR(Connect(broker_options, &broker, &parts));
  const kvstore::BrokerReply hello = broker->hello();
  const auto phase = std::make_shared<SessionPhase>();  // shared, because it outlives the remote
  RemoteOptions with_token = remote_options;
  with_token.session_token = hello.session_token;
  with_token.boot_id = hello.boot_id;
  with_token.max_message_bytes = hello.max_message_bytes;
  with_token.ended_context = phase.get();
  with_token.ended = [](void* context, uint32_t wait_ms) {
    return static_cast<const SessionPhase*>(context)->Wait(SessionPhase::Phase::kOver, wait_ms);
  };
  with_token.detached = [](void* context, uint32_t wait_ms) {
    return static_cast<const SessionPhase*>(context)->Wait(SessionPhase::Phase::kDetached, wait_ms);
  };
  RETURN_IF_ERROR(OpenRemote(with_token, {}, entry, state));
  Remote& remote = *state.remote;
  parts.host = std::make_unique<SidecarHost>(std::move(broker), remote);
  broker_options.resume_token = hello.session_token;
  const auto resume = [broker_options, &remote](uint32_t timeout_ms, LocalLink::Parts* resumed) {
    BrokerOptions resuming = broker_options;
    resuming.open_timeout_ms = timeout_ms;
    std::unique_ptr<Broker> connection;
    const pqc_status status = Connect(resuming, &connection, resumed);
    if (status == PQC_OK) {
      resumed->host = std::make_unique<SidecarHost>(std::move(connection), remote);
    }
    return status;
  };
  const LocalSession::Options local_options{
      .workers = {.hook = options.parallel_for,
                  .hook_context = options.parallel_for_context,
                  .thread_count = options.thread_count},
      .staging_slot_bytes = options.staging_slot_bytes,
      .staging_slot_count = options.staging_slot_count,
      .timeout_ms = remote_options.timeout_ms,
      .phase = phase};
  state.max_message_bytes = hello.max_message_bytes;
  const pqc_status status =
      LocalSession::Open(std::move(parts), resume, local_options, &state.local);
  if (status != PQC_OK) state.remote.reset();
  return status;
}

// Connects once, because gRPC's errors do not distinguish a refusal from an absent sidecar.
pqc_status ProbeAdminSocket(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.size() >= sizeof(address.sun_path)) {
    return Fail(PQC_INVALID_ARGUMENT, "options.endpoint", "%s is too long for a socket path",
                path.c_str());
  }
  std::memcpy(address.sun_path, path.c_str(), path.size() + 1);
  const int probe = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  const bool connected =
      connect(probe, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0;
  const int error = errno;
  if (probe >= 0) close(probe);
  if (connected || error == EAGAIN) return PQC_OK;  // EAGAIN: it listens, and its queue is full
  if (error == EACCES) {
    return Fail(PQC_PERMISSION_DENIED, "options.endpoint",
                "%s: this user is no operator of the sidecar", path.c_str());
  }
  return SetRetry(kRetryMemory,
                  Fail(PQC_UNAVAILABLE, "", "%s: %s", path.c_str(), std::strerror(error)));
}

// Opens a connection to the admin socket, or one with TLS, without a session.
pqc_status OpenAdmin(const RemoteOptions& remote_options, const SecurityOptions& security,
                     const RpcEntry& entry, std::shared_ptr<ClientState>* state) {
  RemoteOptions admin_options = remote_options;
  admin_options.admin = true;
  *state = std::make_shared<ClientState>();
  if (security.tls_ca != nullptr) return OpenRemote(admin_options, security, entry, **state);
  const std::string path = SocketPath(remote_options.endpoint) + kAdminSuffix;
  if (path == kAdminSuffix) {
    return Fail(PQC_INVALID_ARGUMENT, "options.endpoint",
                "\"%s\", must be unix:///path for PQC_PATH_ADMIN without TLS",
                remote_options.endpoint);
  }
  RETURN_IF_ERROR(ProbeAdminSocket(path));
  const std::string endpoint = "unix://" + path;
  admin_options.endpoint = endpoint.c_str();
  return OpenRemote(admin_options, {}, entry, **state);
}

// Opens the local path if the broker answers, the remote path otherwise.
pqc_status OpenEither(const pqc_client_options& options, const RemoteOptions& remote_options,
                      const SecurityOptions& security, const RpcEntry& entry,
                      std::shared_ptr<ClientState>* state) {
  const uint32_t path = RawEnum(options.path);
  const auto open_local = [&] {
    *state = std::make_shared<ClientState>();
    return OpenLocal(options, remote_options, entry, **state);
  };
  pqc_status looked = PQC_OK;
  if (path != PQC_PATH_ONLY_REMOTE) {
    looked = open_local();
    if (looked == PQC_OK || path == PQC_PATH_ONLY_LOCAL) return looked;
  }
  const auto remote = std::make_shared<ClientState>();
  RETURN_IF_ERROR(OpenRemote(remote_options, security, entry, *remote));
  // A sidecar starts its broker before gRPC: after a successful gRPC connection, a sidecar that was
  // still starting has its broker.
  if (looked != PQC_UNAVAILABLE || open_local() != PQC_OK) *state = remote;
  return PQC_OK;
}

// Returns the program's name with '?' for bytes that the sidecar might not accept.
std::string ProgramName() {
  std::string name = program_invocation_short_name;
  for (char& byte : name) {
    if (byte < ' ' || byte > '~') byte = '?';
  }
  return name.substr(0, kMaxClientNameBytes);
}

pqc_status Open(const pqc_client_options* caller_options, pqc_client** client) {
  if (!client) return Fail(PQC_INVALID_ARGUMENT, "client", "must not be NULL");
  *client = nullptr;
  pqc_client_options options;
  RETURN_IF_ERROR(ReadStruct(caller_options, "options", &options));
  SecurityOptions security;
  RETURN_IF_ERROR(ReadSecurity(options, &security));
  const bool secured = security.tls_ca != nullptr;
  RETURN_IF_ERROR(CheckEndpoint(options.endpoint, secured));
  // Over TLS the sidecar knows the tenant.
  const std::string tenant = options.tenant ? options.tenant : secured ? "" : "default";
  const std::string client_name = options.client_name ? options.client_name : ProgramName();
  const uint32_t timeout_ms = options.timeout_ms ? options.timeout_ms : kDefaultTimeoutMs;
  if (options.tenant || !secured) RETURN_IF_ERROR(CheckTenant(tenant.c_str()));
  if (client_name.size() > kMaxClientNameBytes) {
    return Fail(PQC_INVALID_ARGUMENT, "options.client_name", "must be at most %zu bytes",
                kMaxClientNameBytes);
  }
  RETURN_IF_ERROR(CheckPath(options));
  const RpcEntry* entry = nullptr;
  RETURN_IF_ERROR(LoadRpcLibrary(options.rpc_library_path, "options.rpc_library_path", &entry));
  const RemoteOptions remote_options{.endpoint = options.endpoint,
                                     .tenant = tenant.c_str(),
                                     .client_name = client_name.c_str(),
                                     .timeout_ms = timeout_ms,
                                     .remaining_ms = &RemainingMs,
                                     .in_call = &InCall};
  std::shared_ptr<ClientState> state;
  RETURN_IF_ERROR(RawEnum(options.path) == PQC_PATH_ADMIN
                      ? OpenAdmin(remote_options, security, *entry, &state)
                      : OpenEither(options, remote_options, security, *entry, &state));
  state->timeout_ms = timeout_ms;
  ClearLastError();
  state->Start();
  auto opened = std::make_unique<pqc_client>();
  opened->state = std::move(state);
  *client = opened.release();
  return PQC_OK;
}

pqc_status SetThreads(pqc_client* client, uint32_t thread_count) {
  constexpr uint32_t kMaxThreads = 256;
  if (!client) return Fail(PQC_INVALID_ARGUMENT, "client", "must not be NULL");
  if (thread_count > kMaxThreads) {
    return Fail(PQC_INVALID_ARGUMENT, "thread_count", "%u, must be at most %u", thread_count,
                kMaxThreads);
  }
  Remote* remote = nullptr;
  RETURN_IF_ERROR(FindRemote(*client->state, &remote));
  if (client->state->local) client->state->local->workers().SetThreadCount(thread_count);
  return PQC_OK;
}

pqc_status Count(const pqc_client* client, pqc_client_counts* caller_counts) {
  if (!client) return Fail(PQC_INVALID_ARGUMENT, "client", "must not be NULL");
  pqc_client_counts counts;
  RETURN_IF_ERROR(ReadStruct(caller_counts, "counts", &counts));
  Remote* remote = nullptr;
  RETURN_IF_ERROR(FindRemote(*client->state, &remote));
  remote->Count(&counts.rpcs, &counts.background_rpcs);
  const LocalSession* local = client->state->local.get();
  counts.mapped_bytes = local ? local->mapped_bytes() : 0;
  counts.lease_count = local ? local->lease_count() : 0;
  WriteStruct(counts, caller_counts);
  return PQC_OK;
}

struct Answer {
  char* text = nullptr;
  bool out_of_memory = false;
};

// Copies the answer into malloc'ed memory, which its owner frees with this library's pqc_free.
void KeepAnswer(void* context, const char* text, size_t size) {
  auto* answer = static_cast<Answer*>(context);
  answer->text = static_cast<char*>(std::malloc(size + 1));
  answer->out_of_memory = answer->text == nullptr;
  if (!answer->text) return;
  std::memcpy(answer->text, text, size);
  answer->text[size] = '\0';
}

pqc_status AdminJson(pqc_client* client, const char* method, const char* request, char** answer) {
  if (!client) return Fail(PQC_INVALID_ARGUMENT, "client", "must not be NULL");
  if (!method) return Fail(PQC_INVALID_ARGUMENT, "method", "must not be NULL");
  if (!answer) return Fail(PQC_INVALID_ARGUMENT, "answer", "must not be NULL");
  *answer = nullptr;
  Remote* remote = nullptr;
  RETURN_IF_ERROR(GetRemote(*client->state, &remote));
  Answer kept;
  RefusalBuffer error;
  const pqc_status status = remote->AdminJson(method, request && *request ? request : "{}",
                                              TextSink{&kept, &KeepAnswer}, &error);
  if (kept.out_of_memory) {
    return Fail(PQC_RESOURCE_EXHAUSTED, "answer", "the client is out of memory");
  }
  *answer = kept.text;
  return status == PQC_OK ? PQC_OK : Fail(status, error);  // the request has the wire's names
}

}  // namespace
}  // namespace pqcached::client

extern "C" {

pqc_status pqc_client_open(const pqc_client_options* options, pqc_client** client) {
  if (client) *client = nullptr;
  const pqc_status started =
      pqcached::client::Call([] { return pqcached::client::StartCallLog(); });
  if (started != PQC_OK) return started;
  return pqcached::client::RecordedCall(
      "pqc_client_open", [&](pqcached::client::CallRecord& call) { call.Opens("client", client); },
      [&] { return pqcached::client::Open(options, client); });
}

void pqc_client_close(pqc_client* client) {
  if (!client) return;
  pqcached::client::RecordedClose("pqc_client_close", "client", client, [&] {
    client->state->Close();
    delete client;
  });
}

pqc_path pqc_client_path(const pqc_client* client) {
  return client && client->state->local ? PQC_PATH_LOCAL : PQC_PATH_REMOTE;
}

pqc_status pqc_client_set_threads(pqc_client* client, uint32_t thread_count) {
  return pqcached::client::RecordedCall(
      "pqc_client_set_threads",
      [&](pqcached::client::CallRecord& call) {
        call.Handle("client", client).Number("thread_count", thread_count);
      },
      [&] { return pqcached::client::SetThreads(client, thread_count); });
}

pqc_status pqc_client_count(const pqc_client* client, pqc_client_counts* counts) {
  return pqcached::client::RecordedCall(
      "pqc_client_count",
      [&](pqcached::client::CallRecord& call) { call.Handle("client", client); },
      [&] { return pqcached::client::Count(client, counts); });
}

pqc_status pqc_admin_json(pqc_client* client, const char* method, const char* request,
                          char** answer) {
  return pqcached::client::RecordedCall(
      "pqc_admin_json", [&](pqcached::client::CallRecord& call) { call.Handle("client", client); },
      [&] { return pqcached::client::AdminJson(client, method, request, answer); });
}

void pqc_free(void* memory) { std::free(memory); }

}  // extern "C"

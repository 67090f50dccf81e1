// The client: opening, closing, and the tools' door to Admin.
#include <errno.h>

#include <cstdlib>
#include <cstring>
#include <memory>
#include <string_view>

#include "client/arguments.h"
#include "client/error.h"
#include "client/handles.h"
#include "client/rpc_library.h"

namespace pqcached::client {
namespace {

constexpr uint32_t kDefaultTimeoutMs = 10000;
constexpr size_t kMaxTenantBytes = 64;
constexpr size_t kMaxClientNameBytes = 128;

bool IsLoopback(std::string_view host_port) {
  const size_t colon = host_port.rfind(':');
  if (colon == std::string_view::npos) return false;
  const std::string_view host = host_port.substr(0, colon);
  return host == "localhost" || host == "[::1]" || host.starts_with("127.");
}

pqc_status CheckEndpoint(const char* endpoint) {
  if (!endpoint) return Fail(PQC_INVALID_ARGUMENT, "options.endpoint: must not be NULL");
  const std::string_view view = endpoint;
  if (view.starts_with("unix:")) {
    if (view.size() > std::strlen("unix:")) return PQC_OK;
  } else if (const size_t colon = view.rfind(':');
             colon != std::string_view::npos && colon > 0 && colon + 1 < view.size()) {
    if (IsLoopback(view)) return PQC_OK;
    return Fail(PQC_UNIMPLEMENTED,
                "options.endpoint: \"%s\" is not on the loopback; this version has no TLS",
                endpoint);
  }
  return Fail(PQC_INVALID_ARGUMENT,
              "options.endpoint: \"%s\", must be unix:///path or host:port on the loopback",
              endpoint);
}

pqc_status CheckTenant(const char* tenant) {
  const std::string_view view = tenant;
  const bool allowed =
      view.find_first_not_of("abcdefghijklmnopqrstuvwxyz0123456789_.-") == std::string_view::npos;
  if (!view.empty() && view.size() <= kMaxTenantBytes && allowed) return PQC_OK;
  return Fail(PQC_INVALID_ARGUMENT, "options.tenant: must be 1 to %zu bytes of [a-z0-9_.-]",
              kMaxTenantBytes);
}

pqc_status Open(const pqc_client_options* caller_options, pqc_client** client) {
  if (!client) return Fail(PQC_INVALID_ARGUMENT, "client: must not be NULL");
  *client = nullptr;
  pqc_client_options options;
  if (const pqc_status status = ReadStruct(caller_options, "options", &options); status != PQC_OK) {
    return status;
  }
  if (const pqc_status status = CheckEndpoint(options.endpoint); status != PQC_OK) return status;
  RemoteOptions remote_options;
  remote_options.endpoint = options.endpoint;
  remote_options.tenant = options.tenant ? options.tenant : "default";
  remote_options.client_name =
      options.client_name ? options.client_name : program_invocation_short_name;
  remote_options.timeout_ms = options.timeout_ms ? options.timeout_ms : kDefaultTimeoutMs;
  if (const pqc_status status = CheckTenant(remote_options.tenant); status != PQC_OK) return status;
  if (std::strlen(remote_options.client_name) > kMaxClientNameBytes) {
    return Fail(PQC_INVALID_ARGUMENT, "options.client_name: must be at most %zu bytes",
                kMaxClientNameBytes);
  }

  const RpcEntry* entry = nullptr;
  if (const pqc_status status = LoadRpcLibrary(options.rpc_library_path, &entry);
      status != PQC_OK) {
    return status;
  }
  auto state = std::make_shared<ClientState>();
  auto opened = std::make_unique<pqc_client>();
  Remote* remote = nullptr;
  ErrorText error;
  const pqc_status status = Report(entry->open(remote_options, &remote, &error), error);
  if (status != PQC_OK) return status;
  state->remote.reset(remote);
  opened->state = std::move(state);
  *client = opened.release();
  return PQC_OK;
}

struct Answer {
  char* text = nullptr;
  bool out_of_memory = false;
};

// The text is malloc'ed here: its owner frees it with this library's pqc_free.
void KeepAnswer(void* context, const char* text, size_t size) {
  auto* answer = static_cast<Answer*>(context);
  answer->text = static_cast<char*>(std::malloc(size + 1));
  answer->out_of_memory = answer->text == nullptr;
  if (!answer->text) return;
  std::memcpy(answer->text, text, size);
  answer->text[size] = '\0';
}

pqc_status AdminJson(pqc_client* client, const char* method, const char* request, char** answer) {
  if (!client) return Fail(PQC_INVALID_ARGUMENT, "client: must not be NULL");
  if (!method) return Fail(PQC_INVALID_ARGUMENT, "method: must not be NULL");
  if (!answer) return Fail(PQC_INVALID_ARGUMENT, "answer: must not be NULL");
  *answer = nullptr;
  Remote* remote = nullptr;
  if (const pqc_status status = GetRemote(*client->state, &remote); status != PQC_OK) return status;
  Answer kept;
  ErrorText error;
  const pqc_status status = remote->AdminJson(method, request && *request ? request : "{}",
                                              TextSink{&kept, &KeepAnswer}, &error);
  if (kept.out_of_memory) {
    return Fail(PQC_RESOURCE_EXHAUSTED, "answer: the client is out of memory");
  }
  *answer = kept.text;
  return Report(status, error);
}

}  // namespace
}  // namespace pqcached::client

extern "C" {

pqc_status pqc_client_open(const pqc_client_options* options, pqc_client** client) {
  return pqcached::client::Call([&] { return pqcached::client::Open(options, client); });
}

void pqc_client_close(pqc_client* client) {
  if (!client) return;
  client->state->remote.reset();
  delete client;
}

pqc_path pqc_client_path(const pqc_client*) { return PQC_PATH_REMOTE; }

pqc_status pqc_admin_json(pqc_client* client, const char* method, const char* request,
                          char** answer) {
  return pqcached::client::Call(
      [&] { return pqcached::client::AdminJson(client, method, request, answer); });
}

void pqc_free(void* memory) { std::free(memory); }

}  // extern "C"

// The only function that libpqcached_rpc exports.
#include <cstdio>
#include <exception>

#include "client/base/remote.h"
#include "client/rpc/model_config.h"
#include "client/rpc/refusal.h"
#include "client/rpc/rpc_remote.h"

namespace pqcached::client {
namespace {

pqc_status OpenSecured(const RemoteOptions& options, const SecurityOptions& security,
                       Remote** remote, RefusalBuffer* error) {
  try {
    RpcRemote* opened = nullptr;
    const grpc::Status status = RpcRemote::Open(options, security, &opened);
    if (!status.ok()) ToRefusal(status, error);
    *remote = opened;
    return static_cast<pqc_status>(status.error_code());
  } catch (const std::exception& exception) {
    std::snprintf(error->text, sizeof(error->text), "%s", exception.what());
    return PQC_INTERNAL;
  }
}

pqc_status Open(const RemoteOptions& options, Remote** remote, RefusalBuffer* error) {
  return OpenSecured(options, {}, remote, error);
}

}  // namespace
}  // namespace pqcached::client

extern "C" __attribute__((visibility("default"))) const pqcached::client::RpcEntry*
pqcached_rpc_entry() {
  static constexpr pqcached::client::RpcEntry kEntry = {
      .remote_version = pqcached::client::kRemoteVersion,
      .open = &pqcached::client::Open,
      .oldest_client_version = pqcached::client::kOldestRemoteVersion,
      .read_model_config = &pqcached::client::ReadModelConfig,
      .open_secured = &pqcached::client::OpenSecured};
  return &kEntry;
}

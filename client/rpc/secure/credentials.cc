#include "client/rpc/secure/credentials.h"

#include <grpcpp/security/credentials.h>
#include <grpcpp/security/tls_certificate_provider.h>
#include <grpcpp/security/tls_credentials_options.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <iomanip>
#include <utility>

#include "client/rpc/refusal.h"

namespace pqcached::client {
namespace {

constexpr unsigned int kRefreshSeconds = 5;
constexpr char kTokenKey[] = "authorization";
constexpr int kMaxTokenBytes = 512;  // the most that the sidecar takes

std::string OrEmpty(const char* text) { return text == nullptr ? "" : text; }

std::shared_ptr<grpc::ChannelCredentials> MakeChannelCredentials(const SecurityOptions& options) {
  grpc::experimental::TlsChannelCredentialsOptions tls;
  tls.set_certificate_provider(std::make_shared<grpc::experimental::FileWatcherCertificateProvider>(
      OrEmpty(options.tls_key), OrEmpty(options.tls_certificate), options.tls_ca, kRefreshSeconds));
  tls.watch_root_certs();
  if (options.tls_certificate != nullptr) tls.watch_identity_key_cert_pairs();
  return grpc::experimental::TlsCredentials(tls);
}

}  // namespace

Credentials::Credentials(const SecurityOptions& options)
    : server_name_(OrEmpty(options.tls_server_name)),
      token_file_(OrEmpty(options.token_file)),
      channel_(MakeChannelCredentials(options)) {}

grpc::Status Credentials::Make(const SecurityOptions& options,
                               std::shared_ptr<const Credentials>* made) {
  const std::array<std::pair<const char*, const char*>, 4> files = {
      {{"options.tls_ca", options.tls_ca},
       {"options.tls_certificate", options.tls_certificate},
       {"options.tls_key", options.tls_key},
       {"options.token_file", options.token_file}}};
  for (const auto& [field, path] : files) {
    if (path == nullptr || (std::ifstream(path) && std::ifstream(path).peek() != EOF)) continue;
    return Refuse(grpc::StatusCode::INVALID_ARGUMENT, field,
                  "\"" + std::string(path) + "\" cannot be read, or is empty");
  }
  made->reset(new Credentials(options));
  return grpc::Status::OK;
}

void Credentials::SetName(grpc::ChannelArguments* arguments) const {
  if (!server_name_.empty()) arguments->SetSslTargetNameOverride(server_name_);
}

void Credentials::AddToken(grpc::ClientContext* context) const {
  if (token_file_.empty()) return;
  std::string token;
  std::ifstream(token_file_) >> std::setw(kMaxTokenBytes + 1) >> token;
  // gRPC ends the process at metadata that is not text.
  const bool valid =
      !token.empty() && token.size() <= kMaxTokenBytes &&
      std::all_of(token.begin(), token.end(), [](char each) { return each > 0x20 && each < 0x7f; });
  if (valid) context->AddMetadata(kTokenKey, "Bearer " + token);
}

}  // namespace pqcached::client

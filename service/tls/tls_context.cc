#include "service/tls/tls_context.h"

#include <openssl/err.h>

#include <array>
#include <utility>

#include "absl/strings/str_cat.h"
#include "service/base/refusal.h"

namespace pqcached::service {
namespace {

constexpr unsigned char kHttp2[] = {2, 'h', '2'};  // the protocol of gRPC, in ALPN's form

int SelectHttp2(SSL* /*ssl*/, const unsigned char** out, unsigned char* out_size,
                const unsigned char* offered, unsigned int offered_size, void* /*argument*/) {
  unsigned char* selected = nullptr;
  if (SSL_select_next_proto(&selected, out_size, kHttp2, sizeof(kHttp2), offered, offered_size) !=
      OPENSSL_NPN_NEGOTIATED) {
    return SSL_TLSEXT_ERR_ALERT_FATAL;
  }
  *out = selected;
  return SSL_TLSEXT_ERR_OK;
}

// A key that is protected by a passphrase is refused: OpenSSL would ask the terminal for it.
int RefusePassphrase(char* /*buffer*/, int /*size*/, int /*rwflag*/, void* /*argument*/) {
  return -1;
}

absl::Status Invalid(absl::string_view key, const std::string& path) {
  return FailedPrecondition(key, absl::StrCat("'", path, "' is not valid: ", TakeTlsError()));
}

// Sessions are not resumed, so that each connection is checked by the files as they are then.
void SetProtocol(SSL_CTX* context) {
  SSL_CTX_set_min_proto_version(context, TLS1_2_VERSION);
  SSL_CTX_set_options(context, SSL_OP_NO_TICKET | SSL_OP_NO_RENEGOTIATION | SSL_OP_NO_COMPRESSION |
                                   SSL_OP_CIPHER_SERVER_PREFERENCE);
  SSL_CTX_set_cipher_list(context, "ECDHE+AESGCM:ECDHE+CHACHA20");  // those of TLS 1.2
  SSL_CTX_set_session_cache_mode(context, SSL_SESS_CACHE_OFF);
  SSL_CTX_set_num_tickets(context, 0);
  SSL_CTX_set_mode(context, SSL_MODE_ENABLE_PARTIAL_WRITE | SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER |
                                SSL_MODE_RELEASE_BUFFERS);
  // One read takes one record: a client whose records have no data, as updates of its keys, would
  // otherwise occupy the thread as long as it sends them.
  SSL_CTX_clear_mode(context, SSL_MODE_AUTO_RETRY);
  SSL_CTX_set_alpn_select_cb(context, &SelectHttp2, nullptr);
  SSL_CTX_set_default_passwd_cb(context, &RefusePassphrase);
}

}  // namespace

std::string TakeTlsError() {
  const unsigned long error = ERR_get_error();  // NOLINT(google-runtime-int): OpenSSL's type
  ERR_clear_error();
  if (error == 0) return "the connection was closed";
  std::array<char, 256> text = {};
  ERR_error_string_n(error, text.data(), text.size());
  return text.data();
}

TlsContext::TlsContext(TlsFiles files, const Log& log) : files_(std::move(files)), log_(log) {
  for (const std::string& path : {files_.certificate, files_.key, files_.client_ca}) {
    if (!path.empty()) watched_.emplace_back(path);
  }
}

absl::StatusOr<TlsContext::Pointer> TlsContext::Make(const TlsFiles& files) {
  ERR_clear_error();
  Pointer context(SSL_CTX_new(TLS_server_method()));
  if (context == nullptr) return Internal(absl::StrCat("OpenSSL: ", TakeTlsError()));
  SetProtocol(context.get());
  if (SSL_CTX_use_certificate_chain_file(context.get(), files.certificate.c_str()) != 1) {
    return Invalid("tls_certificate", files.certificate);
  }
  if (SSL_CTX_use_PrivateKey_file(context.get(), files.key.c_str(), SSL_FILETYPE_PEM) != 1 ||
      SSL_CTX_check_private_key(context.get()) != 1) {
    return Invalid("tls_key", files.key);
  }
  if (files.client_ca.empty()) return context;
  if (SSL_CTX_load_verify_locations(context.get(), files.client_ca.c_str(), nullptr) != 1) {
    return Invalid("tls_client_ca", files.client_ca);
  }
  SSL_CTX_set_verify(
      context.get(),
      SSL_VERIFY_PEER | (files.certificate_required ? SSL_VERIFY_FAIL_IF_NO_PEER_CERT : 0),
      nullptr);
  return context;
}

absl::StatusOr<std::unique_ptr<TlsContext>> TlsContext::Load(TlsFiles files, const Log& log) {
  std::unique_ptr<TlsContext> loaded(new TlsContext(std::move(files), log));
  for (WatchedFile& file : loaded->watched_) file.MayHaveChanged();  // remembers those read next
  loaded->texts_ = loaded->ReadFiles();
  absl::StatusOr<Pointer> context = Make(loaded->files_);
  if (!context.ok()) return context.status();
  loaded->context_ = *std::move(context);
  return loaded;
}

std::vector<std::string> TlsContext::ReadFiles() const {
  std::vector<std::string> texts;
  for (const WatchedFile& file : watched_) texts.push_back(file.Read().value_or(""));
  return texts;
}

SSL_CTX* TlsContext::Current() {
  bool may_have_changed = !failure_.empty();  // a file may be readable now
  for (WatchedFile& file : watched_) may_have_changed |= file.MayHaveChanged();
  if (!may_have_changed) return context_.get();
  std::vector<std::string> texts = ReadFiles();
  if (failure_.empty() && texts == texts_) return context_.get();
  texts_ = std::move(texts);
  absl::StatusOr<Pointer> context = Make(files_);
  if (context.ok()) {
    context_ = *std::move(context);
    failure_.clear();
    log_.Info("tls_reloaded", {{"certificate", files_.certificate}});
  } else if (failure_ != context.status().message()) {
    failure_ = std::string(context.status().message());
    log_.Error("tls_not_reloaded", {{"message", context.status().message()}});
  }
  return context_.get();
}

}  // namespace pqcached::service

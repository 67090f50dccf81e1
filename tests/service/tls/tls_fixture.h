// A server with TLS, and clients of it with the certificates and tokens that a test chooses.
#ifndef PQCACHED_TESTS_SERVICE_TLS_TLS_FIXTURE_H_
#define PQCACHED_TESTS_SERVICE_TLS_TLS_FIXTURE_H_

#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "service/tls/tls_context.h"
#include "tests/service/rpc/lifecycle_fixture.h"
#include "tests/service/tls/certificates.h"

namespace pqcached::service {

using testing_tls::CertificateFiles;
using testing_tls::ReplaceFile;
using testing_tls::TestCa;
using testing_tls::TextOfFile;

// A session stream over TLS.
struct TlsSession {
  std::unique_ptr<v1::KvCache::Stub> stub;
  std::unique_ptr<grpc::ClientContext> context = std::make_unique<grpc::ClientContext>();
  std::unique_ptr<grpc::ClientReaderWriter<v1::SessionRequest, v1::SessionEvent>> stream;
  v1::SessionOpened opened;

  // Reads to the end of the stream.
  grpc::Status End() {
    v1::SessionEvent event;
    while (stream->Read(&event)) {
    }
    return stream->Finish();
  }
  bool is_open() const { return !opened.session_token().empty(); }
};

// A TCP connection to the server on which the test sends bytes of its own.
class RawConnection {
 public:
  // Connects from 127.0.0.`host`.
  explicit RawConnection(uint16_t port, uint8_t host = 1)
      : descriptor_(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    sockaddr_in address = {};
    address.sin_family = AF_INET;
    const void* generic = &address;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK + host - 1);
    connected_ = bind(descriptor_, static_cast<const sockaddr*>(generic), sizeof(address)) == 0;
    address.sin_port = htons(port);
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    connected_ &= connect(descriptor_, static_cast<const sockaddr*>(generic), sizeof(address)) == 0;
  }
  RawConnection(RawConnection&& other) noexcept
      : descriptor_(std::exchange(other.descriptor_, -1)), connected_(other.connected_) {}
  RawConnection& operator=(RawConnection&&) = delete;
  ~RawConnection() {
    if (descriptor_ >= 0) close(descriptor_);
  }

  bool connected() const { return connected_; }
  bool Send(const std::string& bytes) const {
    return send(descriptor_, bytes.data(), bytes.size(), MSG_NOSIGNAL) ==
           static_cast<ssize_t>(bytes.size());
  }
  // Waits until the server closes the connection; false when the time is over.
  bool IsClosedWithin(std::chrono::milliseconds time) const {
    const auto until = std::chrono::steady_clock::now() + time;
    for (;;) {
      const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(
          until - std::chrono::steady_clock::now());
      pollfd ready = {descriptor_, POLLIN, 0};
      if (left.count() < 0 || poll(&ready, 1, static_cast<int>(left.count())) == 0) return false;
      char bytes[256];
      if (recv(descriptor_, bytes, sizeof(bytes), 0) <= 0) return true;
    }
  }

 private:
  int descriptor_;
  bool connected_ = false;
};

class TlsTest : public LifecycleTest {
 protected:
  static constexpr std::chrono::seconds kTlsPatience{60};

  // The server's certificate is of `ca_`, which clients trust too.
  TlsTest()
      : ca_(directory_, "ca"),
        server_files_(ca_.Issue("server", "IP:127.0.0.1,DNS:localhost")),
        tenant_a_(ca_.Issue("a", "URI:pqcached://tenant/a")) {}

  void StartTls(const std::function<void(Config&)>& change = {}) {
    Start([&](Config& config) {
      config.tcp_listen = "127.0.0.1:0";
      config.tls_certificate = server_files_.certificate;
      config.tls_key = server_files_.key;
      config.tls_client_ca = ca_.certificate();
      config.log_file = directory_ / "log";
      config.log_level = "info";
      config.heartbeat_interval = absl::Milliseconds(10);
      config.handshake_timeout = absl::Minutes(1);  // a slow machine refuses no client
      if (change) change(config);
    });
  }
  // The same with tokens in place of certificates.
  void StartWithTokens(const std::string& tokens) {
    ReplaceFile(token_file(), tokens);
    StartTls([&](Config& config) {
      config.tls_client_ca.clear();
      config.token_file = token_file();
    });
  }
  // A client may have a certificate.
  TlsFiles server_tls_files() const {
    return {.certificate = server_files_.certificate,
            .key = server_files_.key,
            .client_ca = ca_.certificate()};
  }
  std::string token_file() const { return directory_ / "tokens"; }

  std::string address() const { return server_->endpoints().at(1); }
  uint16_t port() const {
    return static_cast<uint16_t>(std::stoul(address().substr(address().rfind(':') + 1)));
  }

  // Makes a connection of its own for a client with this certificate, or none.
  std::shared_ptr<grpc::Channel> TlsChannel(const std::optional<CertificateFiles>& files,
                                            const std::string& ca = {}) const {
    grpc::SslCredentialsOptions options;
    options.pem_root_certs = TextOfFile(ca.empty() ? ca_.certificate() : ca);
    if (files.has_value()) {
      options.pem_cert_chain = TextOfFile(files->certificate);
      options.pem_private_key = TextOfFile(files->key);
    }
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    return grpc::CreateCustomChannel(address(), grpc::SslCredentials(options), arguments);
  }

  static std::unique_ptr<grpc::ClientContext> ContextOf(const std::string& session,
                                                        const std::string& token = {}) {
    auto context = std::make_unique<grpc::ClientContext>();
    context->set_deadline(std::chrono::system_clock::now() + kTlsPatience);
    if (!session.empty()) context->AddMetadata("pqcached-session", session);
    if (!token.empty()) context->AddMetadata("authorization", "Bearer " + token);
    return context;
  }

  static TlsSession OpenTlsSession(const std::shared_ptr<grpc::Channel>& channel,
                                   const std::string& tenant = {}, const std::string& token = {}) {
    TlsSession session;
    session.stub = v1::KvCache::NewStub(channel);
    session.context = ContextOf("", token);
    session.stream = session.stub->Session(session.context.get());
    v1::SessionRequest request;
    request.mutable_open()->set_client_name("test");
    request.mutable_open()->set_tenant(tenant);
    request.mutable_open()->set_protocol_version(1);
    session.stream->Write(request);
    v1::SessionEvent event;
    if (session.stream->Read(&event)) session.opened = event.opened();
    return session;
  }

  static grpc::Status GetInfo(const std::shared_ptr<grpc::Channel>& channel,
                              const std::string& token = {}) {
    v1::GetServerInfoResponse response;
    return v1::Admin::NewStub(channel)->GetServerInfo(ContextOf("", token).get(), {}, &response);
  }
  static grpc::Status ListCaches(const std::shared_ptr<grpc::Channel>& channel,
                                 const std::string& session, const std::string& token = {}) {
    v1::ListCachesResponse response;
    return v1::Admin::NewStub(channel)->ListCaches(ContextOf(session, token).get(), {}, &response);
  }

  std::string LogText() const { return TextOfFile(config_.log_file); }
  // Waits for a line of the log: a client may notice its refusal before the line is written.
  bool IsLogged(const std::string& words) const {
    const auto until = std::chrono::steady_clock::now() + kTlsPatience;
    while (LogText().find(words) == std::string::npos) {
      if (std::chrono::steady_clock::now() > until) return false;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return true;
  }

  const TestCa ca_;
  const CertificateFiles server_files_;
  const CertificateFiles tenant_a_;
};

}  // namespace pqcached::service

#endif  // PQCACHED_TESTS_SERVICE_TLS_TLS_FIXTURE_H_

// The relay between a TLS connection and a plain one, without a server of calls.
#include <openssl/ssl.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <boost/asio.hpp>
#include <memory>
#include <string>

#include "service/tls/tls_context.h"
#include "service/tls/tls_relay.h"
#include "tests/service/tls/tls_fixture.h"

namespace pqcached::service {
namespace {

constexpr int kManyRounds = 1000;

struct ContextDeleter {
  void operator()(SSL_CTX* context) const { SSL_CTX_free(context); }
};

// Two ends of a TLS connection, whose handshake is done. Nothing blocks.
class RelayTest : public TlsTest {
 protected:
  RelayTest() : client_context_(SSL_CTX_new(TLS_client_method())) {
    log_ = *Log::Open("info", directory_ / "log");
    context_ = *TlsContext::Load(server_tls_files(), *log_);
    MakeSockets(tls_);
    client_.reset(SSL_new(client_context_.get()));
    server_.reset(SSL_new(context_->Current()));
    SSL_set_fd(client_.get(), tls_[0]);
    SSL_set_fd(server_.get(), tls_[1]);
    SSL_set_connect_state(client_.get());
    SSL_set_accept_state(server_.get());
    for (int i = 0; i < kManyRounds && SSL_do_handshake(server_.get()) != 1; ++i) {
      SSL_do_handshake(client_.get());
    }
    EXPECT_EQ(SSL_do_handshake(client_.get()), 1);
  }
  ~RelayTest() override {
    close(tls_[0]);
    if (server_ != nullptr) close(tls_[1]);
  }

  static void MakeSockets(int* pair) {
    ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, pair), 0);
  }

  const std::unique_ptr<SSL_CTX, ContextDeleter> client_context_;
  std::unique_ptr<TlsContext> context_;
  int tls_[2] = {-1, -1};
  SslPointer client_;
  SslPointer server_;
};

TEST_F(RelayTest, OneReadTakesOneKeyUpdate) {
  for (int i = 0; i < 100; ++i) {
    ASSERT_EQ(SSL_key_update(client_.get(), SSL_KEY_UPDATE_NOT_REQUESTED), 1);
    ASSERT_EQ(SSL_do_handshake(client_.get()), 1);
  }
  char byte = 0;
  EXPECT_LE(SSL_read(server_.get(), &byte, 1), 0);
  int left = 0;
  ASSERT_EQ(ioctl(tls_[1], FIONREAD, &left), 0);
  EXPECT_GT(left, 0) << "a client that sends them without end holds up no other one";
}

}  // namespace
}  // namespace pqcached::service

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

TEST_F(RelayTest, SendsTheLastBytesOfAPlainSideThatHasClosed) {
  int plain[2] = {-1, -1};
  MakeSockets(plain);
  boost::asio::io_context io;
  const auto work = boost::asio::make_work_guard(io);
  bool ended = false;
  const auto relay =
      std::make_shared<TlsRelay>(io, std::move(server_), TlsRelay::Descriptor(io, tls_[1]),
                                 TlsRelay::Descriptor(io, plain[1]), [&] { ended = true; });
  relay->Start();
  const std::string block(size_t{64} << 10, 'x');
  size_t sent = 0;
  for (int full = 0; full < 2; io.poll()) {  // until the client, which does not read, stops it
    const ssize_t put = send(plain[0], block.data(), block.size(), MSG_NOSIGNAL);
    full = put < 0 ? full + 1 : 0;
    if (put > 0) sent += static_cast<size_t>(put);
  }
  close(plain[0]);
  ASSERT_EQ(SSL_write(client_.get(), "late", 4), 4);
  io.poll();
  size_t received = 0;
  std::string bytes(block.size(), '\0');
  for (int i = 0; i < kManyRounds && !ended; ++i) {
    io.poll();
    int got = 0;
    while ((got = SSL_read(client_.get(), bytes.data(), static_cast<int>(bytes.size()))) > 0) {
      received += static_cast<size_t>(got);
    }
  }
  EXPECT_TRUE(ended);
  EXPECT_EQ(received, sent);
}

}  // namespace
}  // namespace pqcached::service

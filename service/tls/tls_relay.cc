#include "service/tls/tls_relay.h"

#include <openssl/err.h>
#include <sys/socket.h>

#include <cerrno>
#include <utility>

namespace pqcached::service {
namespace {

namespace asio = boost::asio;

// Buffers that a connection may move before others have their turn.
constexpr int kMaxRounds = 8;

}  // namespace

TlsRelay::TlsRelay(asio::io_context& io, SslPointer ssl, Descriptor tls, Descriptor plain,
                   std::function<void()> on_end)
    : io_(io),
      ssl_(std::move(ssl)),
      tls_(std::move(tls)),
      plain_(std::move(plain)),
      on_end_(std::move(on_end)) {}

void TlsRelay::Start() {
  PumpInward();
  PumpOutward();
}

void TlsRelay::PumpInward() {
  if (ended_) return;
  for (int round = 0; round < kMaxRounds; ++round) {
    if (inward_.begin == inward_.end) {
      const Next next = ReadTls();
      if (next != Next::kGo) return Continue(next, tls_, &TlsRelay::PumpInward);
    }
    const Next next = WritePlain();
    if (next != Next::kGo) return Continue(next, plain_, &TlsRelay::PumpInward);
  }
  asio::post(io_, [self = shared_from_this()] { self->PumpInward(); });
}

void TlsRelay::PumpOutward() {
  if (ended_) return;
  for (int round = 0; round < kMaxRounds; ++round) {
    if (outward_.begin == outward_.end) {
      const Next next = ReadPlain();
      if (next != Next::kGo) return Continue(next, plain_, &TlsRelay::PumpOutward);
    }
    const Next next = WriteTls();
    if (next != Next::kGo) return Continue(next, tls_, &TlsRelay::PumpOutward);
  }
  asio::post(io_, [self = shared_from_this()] { self->PumpOutward(); });
}

TlsRelay::Next TlsRelay::NextOf(int result) const {
  switch (SSL_get_error(ssl_.get(), result)) {
    case SSL_ERROR_WANT_READ:
      return Next::kAwaitReadable;
    case SSL_ERROR_WANT_WRITE:
      return Next::kAwaitWritable;
    default:
      return Next::kEnd;
  }
}

TlsRelay::Next TlsRelay::ReadTls() {
  inward_.begin = inward_.end = 0;
  while (inward_.end < inward_.bytes.size()) {
    ERR_clear_error();
    const int got = SSL_read(ssl_.get(), &inward_.bytes[inward_.end],
                             static_cast<int>(inward_.bytes.size() - inward_.end));
    if (got > 0) {
      inward_.end += static_cast<size_t>(got);
    } else if (inward_.end > 0) {
      return Next::kGo;  // the next read has the same result
    } else {
      return NextOf(got);
    }
  }
  return Next::kGo;
}

TlsRelay::Next TlsRelay::WriteTls() {
  while (outward_.begin < outward_.end) {
    ERR_clear_error();
    const int put = SSL_write(ssl_.get(), &outward_.bytes[outward_.begin],
                              static_cast<int>(outward_.end - outward_.begin));
    if (put <= 0) return NextOf(put);
    outward_.begin += static_cast<size_t>(put);
  }
  return Next::kGo;
}

TlsRelay::Next TlsRelay::ReadPlain() {
  outward_.begin = outward_.end = 0;
  const ssize_t got =
      recv(plain_.native_handle(), outward_.bytes.data(), outward_.bytes.size(), MSG_DONTWAIT);
  if (got > 0) {
    outward_.end = static_cast<size_t>(got);
    return Next::kGo;
  }
  return got < 0 && (errno == EAGAIN || errno == EINTR) ? Next::kAwaitReadable : Next::kEnd;
}

TlsRelay::Next TlsRelay::WritePlain() {
  while (inward_.begin < inward_.end) {
    const ssize_t put = send(plain_.native_handle(), &inward_.bytes[inward_.begin],
                             inward_.end - inward_.begin, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (put < 0 && (errno == EPIPE || errno == ECONNRESET)) {
      // The plain side is closed. Its last bytes may still be on their way outward, whose end is
      // that of the relay; until then the bytes of the client are discarded.
      inward_.begin = inward_.end;
      return Next::kGo;
    }
    if (put < 0) return errno == EAGAIN || errno == EINTR ? Next::kAwaitWritable : Next::kEnd;
    inward_.begin += static_cast<size_t>(put);
  }
  return Next::kGo;
}

void TlsRelay::Continue(Next next, Descriptor& descriptor, Pump pump) {
  if (ended_) return;
  if (next == Next::kEnd) return End();
  const auto what = next == Next::kAwaitReadable ? Descriptor::wait_read : Descriptor::wait_write;
  descriptor.async_wait(what,
                        [self = shared_from_this(), pump](const boost::system::error_code& error) {
                          if (!error) ((*self).*pump)();
                        });
}

void TlsRelay::End() {
  ended_ = true;
  ERR_clear_error();
  SSL_shutdown(ssl_.get());  // notifies the peer if the connection still exists
  boost::system::error_code ignored;
  tls_.close(ignored);
  plain_.close(ignored);
  on_end_();
}

}  // namespace pqcached::service

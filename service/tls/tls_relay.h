// TlsRelay carries the bytes of one TLS connection, whose handshake is done, to and from a plain
// socket, until either side closes.
//
// Each direction holds at most one buffer: a side that does not read stops the other one. Used on
// the thread of its io_context only; it lives as long as it waits for a socket.
#ifndef PQCACHED_SERVICE_TLS_TLS_RELAY_H_
#define PQCACHED_SERVICE_TLS_TLS_RELAY_H_

#include <openssl/ssl.h>

#include <array>
#include <boost/asio.hpp>
#include <cstddef>
#include <functional>
#include <memory>

namespace pqcached::service {

struct SslDeleter {
  void operator()(SSL* ssl) const { SSL_free(ssl); }
};
using SslPointer = std::unique_ptr<SSL, SslDeleter>;

class TlsRelay final : public std::enable_shared_from_this<TlsRelay> {
 public:
  using Descriptor = boost::asio::posix::stream_descriptor;

  // The descriptors do not block; `ssl` uses that of `tls`. `on_end` is called once, when the relay
  // has ended.
  TlsRelay(boost::asio::io_context& io, SslPointer ssl, Descriptor tls, Descriptor plain,
           std::function<void()> on_end);

  void Start();

 private:
  enum class Next { kGo, kAwaitReadable, kAwaitWritable, kEnd };
  using Pump = void (TlsRelay::*)();

  struct Buffer {
    std::array<char, size_t{64} << 10> bytes;
    size_t begin = 0;  // the bytes [begin, end) are to be written
    size_t end = 0;
  };

  void PumpInward();   // TLS -> plain
  void PumpOutward();  // plain -> TLS
  Next ReadTls();
  Next WriteTls();
  Next ReadPlain();
  Next WritePlain();
  // Returns the meaning of a result of OpenSSL that is no success.
  Next NextOf(int result) const;
  // Continues `pump` when `descriptor` is ready, or ends the relay.
  void Continue(Next next, Descriptor& descriptor, Pump pump);
  void End();

  boost::asio::io_context& io_;
  SslPointer ssl_;
  Descriptor tls_;
  Descriptor plain_;
  std::function<void()> on_end_;
  Buffer inward_;
  Buffer outward_;
  bool ended_ = false;
};

}  // namespace pqcached::service

#endif  // PQCACHED_SERVICE_TLS_TLS_RELAY_H_

#include "service/tls/tls_gate.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <openssl/err.h>
#include <pthread.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <list>
#include <map>
#include <new>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kvstore/clock.h"
#include "kvstore/mutex.h"
#include "service/base/limited_log.h"
#include "service/base/refusal.h"
#include "service/session/sessions.h"
#include "service/tls/handshake_result.h"
#include "service/tls/tls_relay.h"

namespace pqcached::service {
namespace {

namespace asio = boost::asio;
using boost::system::error_code;
using Descriptor = asio::posix::stream_descriptor;

constexpr unsigned char kHandshakeRecord = 22;  // the first byte of every TLS connection
constexpr absl::Duration kFlushTime = absl::Milliseconds(200);
// Time after which the kernel ends a connection whose client takes no bytes.
constexpr int kUnsentMilliseconds = 10 * 60'000;
constexpr size_t kNameBytes = 8;  // random bytes in the names of plain sockets
constexpr absl::string_view kPeerPrefix = "unix-abstract:";  // gRPC's, of an abstract name

// OpenSSL writes to sockets without MSG_NOSIGNAL.
void BlockBrokenPipe() {
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGPIPE);
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);
}

asio::ip::tcp::endpoint PeerOf(int descriptor) {
  asio::ip::tcp::endpoint peer;
  auto size = static_cast<socklen_t>(peer.capacity());
  if (getpeername(descriptor, peer.data(), &size) == 0) peer.resize(size);
  return peer;
}

// Returns the address by which clients are counted: that of the network for IPv6, where one client
// may have the 2^64 addresses of its network.
asio::ip::address OriginOf(const asio::ip::address& address) {
  if (!address.is_v6()) return address;
  const asio::ip::address_v6 full = address.to_v6();
  if (full.is_v4_mapped()) return asio::ip::make_address_v4(asio::ip::v4_mapped, full);
  asio::ip::address_v6::bytes_type bytes = full.to_bytes();
  std::fill(bytes.begin() + bytes.size() / 2, bytes.end(), 0);
  return asio::ip::address_v6(bytes);
}

// Returns whether the io_context of `socket` has taken the descriptor. Owns the descriptor.
bool Assign(Descriptor& socket, int descriptor) {
  error_code failed;
  socket.assign(descriptor, failed);
  if (failed) close(descriptor);
  return !failed;
}

// Makes a pair of connected sockets, of which the second one has the abstract name `name`.
bool MakePair(const std::string& name, int* pair) {
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, pair) != 0) return false;
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  name.copy(address.sun_path + 1, sizeof(address.sun_path) - 1);
  const size_t size = offsetof(sockaddr_un, sun_path) + 1 + name.size();
  asio::generic::stream_protocol::endpoint bound(&address, size);
  if (bind(pair[1], bound.data(), static_cast<socklen_t>(size)) == 0) return true;
  close(pair[0]);
  close(pair[1]);
  return false;
}

}  // namespace

class TlsGate::Impl {
 public:
  Impl(Options options, std::unique_ptr<TlsContext> context, const Log& log)
      : options_(std::move(options)), context_(std::move(context)), refusals_(log, "tls_refused") {}

  ~Impl() {
    StopHandshakes();
    AwaitRelays();
    relays_.stop();
    if (relay_thread_.joinable()) relay_thread_.join();
  }

  void Serve(std::function<void(int descriptor)> take) {
    take_ = std::move(take);
    thread_ = std::thread([this] { RunThread(handshakes_io_); });
    relay_thread_ = std::thread([this] { RunThread(relays_); });
  }

  // Waits while connections arrive faster than they are taken: the kernel then holds those that
  // follow, in their order.
  void Admit(int descriptor) {
    {
      const kvstore::MutexLock lock(&mutex_);
      while (arriving_ >= options_.max_handshakes) taken_.Wait(&mutex_);
      ++arriving_;
    }
    asio::post(handshakes_io_, [this, descriptor] {
      {
        const kvstore::MutexLock lock(&mutex_);
        --arriving_;
        taken_.SignalAll();
      }
      Begin(descriptor);
    });
  }

  void StopHandshakes() {
    if (!thread_.joinable()) return;
    asio::post(handshakes_io_, [this] {
      while (!handshakes_.empty()) Remove(handshakes_.front());
      handshakes_io_.stop();
    });
    thread_.join();
  }

  std::shared_ptr<const TlsClient> ClientOf(absl::string_view peer) const {
    const kvstore::MutexLock lock(&mutex_);
    const auto found = clients_.find(peer);
    return found == clients_.end() ? nullptr : found->second.client;
  }

 private:
  struct Handshake {
    Handshake(asio::io_context& io, int descriptor)
        : socket(io), deadline(io), peer(PeerOf(descriptor)), origin(OriginOf(peer.address())) {}

    std::string address() const {
      return absl::StrCat(peer.address().to_string(), ":", peer.port());
    }

    Descriptor socket;
    asio::steady_timer deadline;
    const asio::ip::tcp::endpoint peer;
    const asio::ip::address origin;
    SslPointer ssl;      // null until the client has sent its first byte
    bool ended = false;  // it is complete, or was refused
  };
  struct Connection {
    std::shared_ptr<const TlsClient> client;
    std::string owner;  // its identity or its origin, by which connections are counted
  };
  using HandshakePointer = std::shared_ptr<Handshake>;

  static void RunThread(asio::io_context& io) {
    BlockBrokenPipe();
    const auto work = asio::make_work_guard(io);
    io.run();
  }

  void Begin(int descriptor) {
    setsockopt(descriptor, IPPROTO_TCP, TCP_USER_TIMEOUT, &kUnsentMilliseconds,
               sizeof(kUnsentMilliseconds));
    const auto handshake = std::make_shared<Handshake>(handshakes_io_, descriptor);
    handshakes_.push_back(handshake);
    ++hosts_[handshake->origin];
    if (!Assign(handshake->socket, descriptor)) {
      return Refuse(handshake, {"no_descriptors", "the kernel watches no more of them"});
    }
    if (handshakes_.size() > options_.max_handshakes) DropOne();
    if (handshake->ended) return;
    handshake->deadline.expires_after(absl::ToChronoNanoseconds(options_.handshake_timeout));
    handshake->deadline.async_wait([this, handshake](const error_code& cancelled) {
      if (!cancelled) Refuse(handshake, {"timeout", "the handshake took too long"});
    });
    Await(handshake, Descriptor::wait_read);
  }

  // Closes the oldest one of the handshakes whose address has the most.
  void DropOne() {
    size_t most = 0;
    for (const auto& [origin, count] : hosts_) most = std::max(most, count);
    const auto oldest =
        std::find_if(handshakes_.begin(), handshakes_.end(),
                     [&](const HandshakePointer& each) { return hosts_.at(each->origin) == most; });
    Refuse(*oldest,
           {"too_many_handshakes", absl::StrCat("max_handshakes is ", options_.max_handshakes)});
  }

  void Await(const HandshakePointer& handshake, Descriptor::wait_type what) {
    handshake->socket.async_wait(what, [this, handshake](const error_code& error) {
      if (!error && !handshake->ended) Continue(handshake);
    });
  }

  void Continue(const HandshakePointer& handshake) {
    if (handshake->ssl == nullptr && !Open(handshake)) return;
    ERR_clear_error();
    const int result = SSL_accept(handshake->ssl.get());
    if (result == 1) return Finish(handshake);
    switch (SSL_get_error(handshake->ssl.get(), result)) {
      case SSL_ERROR_WANT_READ:
        return Await(handshake, Descriptor::wait_read);
      case SSL_ERROR_WANT_WRITE:
        return Await(handshake, Descriptor::wait_write);
      default:
        return Refuse(handshake, FailureOf(handshake->ssl.get()));
    }
  }

  // Begins TLS on a connection that has received its first byte. Returns false when it is refused.
  bool Open(const HandshakePointer& handshake) {
    unsigned char first = 0;
    const int descriptor = handshake->socket.native_handle();
    if (recv(descriptor, &first, 1, MSG_PEEK | MSG_DONTWAIT) != 1) {
      Refuse(handshake, {"closed_by_client", "before its first byte"});
      return false;
    }
    if (first != kHandshakeRecord) {
      Refuse(handshake, {"plain_text", "the first byte is not that of TLS"});
      return false;
    }
    handshake->ssl.reset(SSL_new(context_->Current()));
    if (handshake->ssl == nullptr || SSL_set_fd(handshake->ssl.get(), descriptor) != 1) {
      Refuse(handshake, {"out_of_memory", TakeTlsError()});
      return false;
    }
    return true;
  }

  void Refuse(const HandshakePointer& handshake, const HandshakeFailure& failure) {
    if (handshake->ended) return;
    refusals_.Note(failure.reason, handshake->address(), failure.message);
    Remove(handshake);
  }

  // Closes the connection, unless its descriptor was released.
  void Remove(const HandshakePointer& handshake) {
    HandshakePointer kept = handshake;  // may be a reference into the list
    kept->ended = true;
    handshakes_.remove(kept);
    const auto host = hosts_.find(kept->origin);
    if (--host->second == 0) hosts_.erase(host);
    kept->deadline.cancel();
    error_code ignored;
    kept->socket.close(ignored);
    kept.reset();  // perhaps the last reference
  }

  void Finish(const HandshakePointer& handshake) {
    const absl::StatusOr<std::optional<Identity>> identity = IdentityOf(handshake->ssl.get());
    if (!identity.ok()) {
      return Refuse(handshake, {"no_identity", TextOf(identity.status())});
    }
    const std::string name = absl::StrCat("pqcached-tls/", id_, "/", ++last_number_);
    const std::string peer = absl::StrCat(kPeerPrefix, name);
    const auto client = std::make_shared<TlsClient>(TlsClient{handshake->address(), *identity});
    if (!Count(peer, client, handshake->origin)) {
      return Refuse(handshake,
                    {"too_many_connections", absl::StrCat("at most ", options_.max_connections)});
    }
    int pair[2] = {-1, -1};
    if (!MakePair(name, pair)) {
      Forget(peer);
      return Refuse(handshake, {"no_descriptors", std::strerror(errno)});
    }
    const std::shared_ptr<TlsRelay> relay =
        MakeRelay(*handshake, pair[1], [this, peer] { Forget(peer); });
    if (relay == nullptr) {
      close(pair[0]);
      Forget(peer);
      return Refuse(handshake, {"out_of_memory", "for the relay of the connection"});
    }
    Remove(handshake);
    asio::post(relays_, [relay] { relay->Start(); });
    take_(pair[0]);
  }

  // Returns the relay of a complete handshake; null when there is no memory for it, or the kernel
  // watches no more descriptors. Owns `plain_descriptor`.
  std::shared_ptr<TlsRelay> MakeRelay(Handshake& handshake, int plain_descriptor,
                                      std::function<void()> on_end) {
    Descriptor tls(relays_);
    Descriptor plain(relays_);
    if (!Assign(plain, plain_descriptor) || !Assign(tls, handshake.socket.release())) {
      return nullptr;
    }
    try {
      return std::make_shared<TlsRelay>(relays_, std::move(handshake.ssl), std::move(tls),
                                        std::move(plain), std::move(on_end));
    } catch (const std::bad_alloc&) {
      return nullptr;
    }
  }

  // Counts the connection, unless there are too many.
  bool Count(const std::string& peer, const std::shared_ptr<const TlsClient>& client,
             const asio::ip::address& origin) {
    const bool is_known = client->identity.has_value();
    const std::string owner = is_known ? IdentityText(*client->identity) : origin.to_string();
    const int64_t most = options_.max_connections / 4 * (is_known ? 3 : 1);
    const kvstore::MutexLock lock(&mutex_);
    if (clients_.size() >= options_.max_connections) return false;
    const auto same = std::count_if(clients_.begin(), clients_.end(),
                                    [&](const auto& each) { return each.second.owner == owner; });
    if (same >= std::max<int64_t>(1, most)) return false;
    clients_[peer] = {client, owner};
    return true;
  }

  void Forget(const std::string& peer) {
    const kvstore::MutexLock lock(&mutex_);
    clients_.erase(peer);
    if (clients_.empty()) emptied_.SignalAll();
  }

  // Waits until the last bytes of connections that the server has closed are sent.
  void AwaitRelays() {
    if (!relay_thread_.joinable()) return;
    const kvstore::SteadyTime until = kvstore::SteadyTime::Now() + kFlushTime;
    const kvstore::MutexLock lock(&mutex_);
    while (!clients_.empty() && kvstore::SteadyTime::Now() < until) {
      emptied_.WaitUntil(&mutex_, until);
    }
  }

  const Options options_;
  const std::string id_ = RandomHex(kNameBytes);
  const std::unique_ptr<TlsContext> context_;  // used on thread_ only, like the next two
  uint64_t last_number_ = 0;
  LimitedLog refusals_;
  std::function<void(int descriptor)> take_;
  mutable kvstore::Mutex mutex_;
  kvstore::CondVar taken_;                         // signalled when arriving_ becomes smaller
  uint32_t arriving_ ABSL_GUARDED_BY(mutex_) = 0;  // connections whose Begin is posted
  kvstore::CondVar emptied_;                       // signalled when clients_ becomes empty
  std::map<std::string, Connection, std::less<>> clients_
      ABSL_GUARDED_BY(mutex_);  // by the name of the peer in gRPC
  asio::io_context handshakes_io_{1};
  asio::io_context relays_{1};
  // Used on thread_ only: handshakes in the order of their arrival, and their number by origin.
  std::list<HandshakePointer> handshakes_;
  std::map<asio::ip::address, size_t> hosts_;
  std::thread thread_;
  std::thread relay_thread_;
};

absl::StatusOr<std::unique_ptr<TlsGate>> TlsGate::Make(Options options, const Log& log) {
  absl::StatusOr<std::unique_ptr<TlsContext>> context = TlsContext::Load(options.files, log);
  if (!context.ok()) return context.status();
  return std::unique_ptr<TlsGate>(
      new TlsGate(std::make_unique<Impl>(std::move(options), *std::move(context), log)));
}

TlsGate::TlsGate(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

TlsGate::~TlsGate() = default;

void TlsGate::Serve(std::function<void(int descriptor)> take) { impl_->Serve(std::move(take)); }

void TlsGate::Admit(int descriptor) { impl_->Admit(descriptor); }

void TlsGate::StopHandshakes() { impl_->StopHandshakes(); }

std::shared_ptr<const TlsClient> TlsGate::ClientOf(absl::string_view peer) const {
  return impl_->ClientOf(peer);
}

}  // namespace pqcached::service

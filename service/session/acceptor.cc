#include "service/session/acceptor.h"

#include <netinet/tcp.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <boost/asio.hpp>
#include <chrono>
#include <cstring>
#include <map>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "kvstore/mutex.h"
#include "service/base/log.h"
#include "service/base/refusal.h"
#include "service/supervise/socket_claim.h"

namespace pqcached::service {
namespace {

namespace asio = boost::asio;
using StreamProtocol = asio::generic::stream_protocol;
using boost::system::error_code;

// Pause after a failed accept: the process has no descriptor left.
constexpr std::chrono::milliseconds kPauseAfterError(100);

constexpr uid_t kUnknownUser = ~uid_t{0};  // of a TCP peer

absl::string_view HostOf(absl::string_view address) {
  return address.substr(0, address.rfind(':'));
}

// Returns the number that identifies the socket of a descriptor; 0 when it is not open.
ino_t SocketOf(int descriptor) {
  struct stat status = {};
  return fstat(descriptor, &status) == 0 ? status.st_ino : 0;
}

}  // namespace

class Acceptor::Impl {
 public:
  Impl(Options options, Log& log)
      : options_(std::move(options)), log_(log), acceptor_(io_), pause_(io_) {}
  ~Impl() { Stop(); }

  absl::Status Bind() {
    error_code error;
    const StreamProtocol::endpoint endpoint = Endpoint(error);
    if (!error) acceptor_.open(endpoint.protocol(), error);
    if (!error && is_tcp()) acceptor_.set_option(asio::socket_base::reuse_address(true), error);
    if (!error) {
      const ScopedUmask mask(static_cast<mode_t>(~options_.mode & 0777));
      acceptor_.bind(endpoint, error);
    }
    if (!error) acceptor_.listen(asio::socket_base::max_listen_connections, error);
    if (!error) return absl::OkStatus();
    return FailedPrecondition("", absl::StrCat("cannot listen on ", name(), ": ", error.message()));
  }

  std::string address() const {
    if (!is_tcp()) return options_.path;
    error_code ignored;
    const StreamProtocol::endpoint bound = acceptor_.local_endpoint(ignored);
    asio::ip::tcp::endpoint same;
    std::memcpy(same.data(), bound.data(), std::min(bound.size(), same.capacity()));
    return absl::StrCat(HostOf(options_.tcp_address), ":", same.port());
  }

  void Serve(std::function<void(int descriptor)> take) {
    take_ = std::move(take);
    Accept();
    thread_ = std::thread([this] { io_.run(); });
  }

  void Stop() {
    if (stopped_) return;
    stopped_ = true;
    asio::post(io_, [this] {
      error_code ignored;
      acceptor_.close(ignored);
      pause_.cancel();
    });
    if (thread_.joinable()) thread_.join();
    if (!is_tcp()) unlink(options_.path.c_str());
  }

  std::string DescribePeer(int descriptor) const {
    const kvstore::MutexLock lock(&mutex_);
    const auto found = peers_.find(descriptor);
    if (found == peers_.end()) return "";
    return absl::StrCat("uid=", found->second.credentials.uid,
                        " pid=", found->second.credentials.pid);
  }

 private:
  struct Peer {
    ucred credentials = {};
    ino_t socket = 0;
  };

  bool is_tcp() const { return !options_.tcp_address.empty(); }
  const std::string& name() const { return is_tcp() ? options_.tcp_address : options_.path; }

  StreamProtocol::endpoint Endpoint(error_code& error) {
    if (!is_tcp()) return asio::local::stream_protocol::endpoint(options_.path);
    const std::string& address = options_.tcp_address;
    std::string host(absl::StripSuffix(absl::StripPrefix(HostOf(address), "["), "]"));
    asio::ip::tcp::resolver resolver(io_);
    const auto found = resolver.resolve(host, address.substr(address.rfind(':') + 1), error);
    return error ? StreamProtocol::endpoint() : StreamProtocol::endpoint(found.begin()->endpoint());
  }

  void Accept() {
    acceptor_.async_accept([this](const error_code& error, StreamProtocol::socket socket) {
      if (!acceptor_.is_open()) return;
      if (error) {
        LogOnce(cannot_accept_, "cannot_accept", error.message());
        pause_.expires_after(kPauseAfterError);
        pause_.async_wait([this](const error_code& cancelled) {
          if (!cancelled) Accept();
        });
        return;
      }
      cannot_accept_ = false;
      Admit(std::move(socket));
      Accept();
    });
  }

  void Admit(StreamProtocol::socket socket) {
    ucred peer = {.pid = 0, .uid = kUnknownUser, .gid = kUnknownUser};
    socklen_t size = sizeof(peer);
    if (is_tcp()) {
      const int yes = 1;  // small messages are sent at once
      setsockopt(socket.native_handle(), IPPROTO_TCP, TCP_NODELAY, &yes, sizeof(yes));
    } else if (getsockopt(socket.native_handle(), SOL_SOCKET, SO_PEERCRED, &peer, &size) != 0) {
      return;
    }
    if (options_.operators_only && peer.uid != 0 && peer.uid != geteuid()) {
      log_.Warning("operator_denied", {{"uid", peer.uid}, {"pid", peer.pid}});
      return;
    }
    if (!Count(socket.native_handle(), peer)) {
      LogOnce(too_many_, "too_many_connections", absl::StrCat("uid=", peer.uid, " pid=", peer.pid));
      return;
    }
    too_many_ = false;
    socket.native_non_blocking(true);
    take_(socket.release());
  }

  // Counts the connection, unless one of the limits is reached.
  bool Count(int descriptor, const ucred& peer) {
    const kvstore::MutexLock lock(&mutex_);
    if (!HasRoom(peer.uid)) {
      // The owner of a descriptor closes it without a call of this class.
      std::erase_if(peers_,
                    [](const auto& each) { return SocketOf(each.first) != each.second.socket; });
      if (!HasRoom(peer.uid)) return false;
    }
    peers_[descriptor] = {.credentials = peer, .socket = SocketOf(descriptor)};
    return true;
  }

  bool HasRoom(uid_t uid) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (peers_.size() >= options_.max_connections) return false;
    uint32_t same = 0;
    for (const auto& [descriptor, peer] : peers_) same += peer.credentials.uid == uid ? 1 : 0;
    return same < options_.max_connections_per_uid;
  }

  // Logs the first of a run of equal events: a client that repeats does not fill the log.
  void LogOnce(bool& logged, const char* event, const std::string& message) {
    if (!std::exchange(logged, true)) {
      log_.Warning(event, {{"socket", name()}, {"message", message}});
    }
  }

  const Options options_;
  Log& log_;
  asio::io_context io_{1};
  asio::basic_socket_acceptor<StreamProtocol> acceptor_;
  asio::steady_timer pause_;
  std::function<void(int descriptor)> take_;
  bool cannot_accept_ = false;  // used on the thread only, like the next
  bool too_many_ = false;
  bool stopped_ = false;
  std::thread thread_;
  mutable kvstore::Mutex mutex_;
  std::map<int, Peer> peers_ ABSL_GUARDED_BY(mutex_);  // by descriptor
};

absl::StatusOr<std::unique_ptr<Acceptor>> Acceptor::Bind(Options options, Log& log) {
  auto impl = std::make_unique<Impl>(std::move(options), log);
  if (absl::Status status = impl->Bind(); !status.ok()) return status;
  return std::unique_ptr<Acceptor>(new Acceptor(std::move(impl)));
}

Acceptor::Acceptor(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

Acceptor::~Acceptor() = default;

void Acceptor::Serve(std::function<void(int descriptor)> take) { impl_->Serve(std::move(take)); }

void Acceptor::Stop() { impl_->Stop(); }

std::string Acceptor::address() const { return impl_->address(); }

std::string Acceptor::DescribePeer(int descriptor) const { return impl_->DescribePeer(descriptor); }

}  // namespace pqcached::service

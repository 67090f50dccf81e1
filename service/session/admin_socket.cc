#include "service/session/admin_socket.h"

#include <sys/socket.h>
#include <unistd.h>

#include <boost/asio.hpp>
#include <chrono>
#include <map>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kvstore/mutex.h"
#include "service/base/log.h"
#include "service/base/refusal.h"
#include "service/supervise/socket_claim.h"

namespace pqcached::service {
namespace {

namespace asio = boost::asio;
using asio::local::stream_protocol;
using boost::system::error_code;

constexpr mode_t kOperatorsOnly = 0600;
// Pause after a failed accept: the process has no descriptor left.
constexpr std::chrono::milliseconds kPauseAfterError(100);

}  // namespace

class AdminSocket::Impl {
 public:
  Impl(std::string path, Log& log)
      : path_(std::move(path)), log_(log), acceptor_(io_), pause_(io_) {}
  ~Impl() { Stop(); }

  absl::Status Bind() {
    error_code error;
    acceptor_.open(stream_protocol(), error);
    if (!error) {
      const ScopedUmask mask(static_cast<mode_t>(~kOperatorsOnly & 0777));
      acceptor_.bind(stream_protocol::endpoint(path_), error);
    }
    if (!error) acceptor_.listen(asio::socket_base::max_listen_connections, error);
    if (!error) return absl::OkStatus();
    return FailedPrecondition("", absl::StrCat("cannot listen on ", path_, ": ", error.message()));
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
    unlink(path_.c_str());
  }

  std::string DescribePeer(int descriptor) const {
    const kvstore::MutexLock lock(&mutex_);
    const auto found = peers_.find(descriptor);
    return found == peers_.end() ? std::string() : found->second;
  }

 private:
  void Accept() {
    acceptor_.async_accept([this](const error_code& error, stream_protocol::socket socket) {
      if (!acceptor_.is_open()) return;
      if (error) {
        pause_.expires_after(kPauseAfterError);
        pause_.async_wait([this](const error_code& cancelled) {
          if (!cancelled) Accept();
        });
        return;
      }
      Admit(std::move(socket));
      Accept();
    });
  }

  void Admit(stream_protocol::socket socket) {
    ucred peer = {};
    socklen_t size = sizeof(peer);
    if (getsockopt(socket.native_handle(), SOL_SOCKET, SO_PEERCRED, &peer, &size) != 0) return;
    if (peer.uid != 0 && peer.uid != geteuid()) {
      log_.Warning("operator_denied", {{"uid", peer.uid}, {"pid", peer.pid}});
      return;
    }
    socket.native_non_blocking(true);
    const int descriptor = socket.release();
    {
      const kvstore::MutexLock lock(&mutex_);
      peers_[descriptor] = absl::StrCat("uid=", peer.uid, " pid=", peer.pid);
    }
    take_(descriptor);
  }

  const std::string path_;
  Log& log_;
  asio::io_context io_{1};
  stream_protocol::acceptor acceptor_;
  asio::steady_timer pause_;
  std::function<void(int descriptor)> take_;
  bool stopped_ = false;
  std::thread thread_;
  mutable kvstore::Mutex mutex_;
  std::map<int, std::string> peers_ ABSL_GUARDED_BY(mutex_);
};

absl::StatusOr<std::unique_ptr<AdminSocket>> AdminSocket::Bind(const std::string& path, Log& log) {
  auto impl = std::make_unique<Impl>(path, log);
  if (absl::Status status = impl->Bind(); !status.ok()) return status;
  return std::unique_ptr<AdminSocket>(new AdminSocket(std::move(impl)));
}

AdminSocket::AdminSocket(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

AdminSocket::~AdminSocket() = default;

void AdminSocket::Serve(std::function<void(int descriptor)> take) { impl_->Serve(std::move(take)); }

void AdminSocket::Stop() { impl_->Stop(); }

std::string AdminSocket::DescribePeer(int descriptor) const {
  return impl_->DescribePeer(descriptor);
}

}  // namespace pqcached::service

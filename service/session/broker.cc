#include "service/session/broker.h"

#include <sys/socket.h>
#include <unistd.h>

#include <utility>  // before Asio, whose headers use it without including it

#include <boost/asio/bind_executor.hpp>
#include <boost/asio/buffer.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/local/stream_protocol.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/read.hpp>
#include <boost/asio/steady_timer.hpp>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <set>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "kernels/base/status_macros.h"
#include "kvstore/read/broker_protocol.h"
#include "service/base/event.h"
#include "service/base/guarded.h"
#include "service/base/log.h"
#include "service/base/refusal.h"
#include "service/base/shortage_log.h"
#include "service/supervise/kept_sessions.h"
#include "service/supervise/socket_claim.h"

namespace pqcached::service {
namespace {

namespace asio = boost::asio;
using asio::local::stream_protocol;
using boost::system::error_code;
using kvstore::BrokerCall;
using kvstore::BrokerReply;
using kvstore::BrokerRequest;

// Number of connections without an open session (hello not received yet) that are accepted beyond
// max_sessions.
constexpr size_t kMaxUnopened = 64;
// Number of them that one user (uid) may have.
constexpr size_t kMaxUnopenedOfUid = 16;
// Pause after a failed accept, for example because the process has run out of descriptors.
constexpr std::chrono::milliseconds kAcceptPause(100);

// Copies a zero-terminated text field to `text`. Returns false when the field has no terminating
// zero.
template <size_t kSize>
bool TextOf(const char (&field)[kSize], std::string& text) {
  const size_t length = strnlen(field, kSize);
  text.assign(field, length);
  return length < kSize;
}

template <size_t kSize>
void SetText(char (&field)[kSize], absl::string_view text) {
  const size_t length = std::min(text.size(), kSize - 1);
  if (length > 0) std::memcpy(field, text.data(), length);  // data() of an empty text may be null
  std::memset(field + length, 0, kSize - length);
}

// Sends the rest of the reply, from byte `sent` on; the descriptor goes with the first byte.
// Returns the number of bytes sent, or -1 and errno like sendmsg.
ssize_t SendPart(int socket, const BrokerReply& reply, size_t sent, int descriptor) {
  iovec part = {const_cast<char*>(reinterpret_cast<const char*>(&reply)) + sent,
                sizeof(reply) - sent};
  msghdr message = {};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  if (descriptor >= 0 && sent == 0) {
    message.msg_control = control;
    message.msg_controllen = sizeof(control);
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(header), &descriptor, sizeof(int));
  }
  return sendmsg(socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
}

uint64_t BootWordOf(const std::string& boot_id) {
  const uint64_t word = std::strtoull(boot_id.c_str(), nullptr, 16);
  return word == 0 ? 1 : word;  // 0 means that the worker has ended
}

}  // namespace

std::string BrokerPath(const std::string& socket_path) {
  return socket_path + kvstore::kBrokerSuffix;
}

class Broker::Impl : public std::enable_shared_from_this<Broker::Impl> {
 public:
  Impl(Parts parts, std::unique_ptr<SocketClaim> claim)
      : parts_(std::move(parts)),
        boot_word_(BootWordOf(parts_.boot_id)),
        claim_(std::move(claim)),
        acceptor_(io_),
        pause_(io_),
        shortages_(parts_.log) {}

  absl::Status Listen(const std::string& path) {
    path_ = path;
    error_code error;
    acceptor_.open(stream_protocol(), error);
    if (!error) {
      const ScopedUmask mask(static_cast<mode_t>(~parts_.config.socket_mode & 0777));
      acceptor_.bind(stream_protocol::endpoint(path), error);
    }
    if (!error) acceptor_.listen(asio::socket_base::max_listen_connections, error);
    if (error) {
      return FailedPrecondition("", absl::StrCat("cannot listen on ", path, ": ", error.message()));
    }
    Accept();
    thread_ = std::thread([this] { Run(); });
    return absl::OkStatus();
  }

  bool IsResponsive(absl::Duration timeout) {
    const auto answered = std::make_shared<Event>();  // shared: this call may end before the task
    asio::post(io_, [answered] { answered->Notify(); });
    return answered->WaitFor(timeout);
  }

  void EndSessionsIf(const SessionFilter& filter, absl::Duration timeout) {
    const auto ended = std::make_shared<Event>();  // shared: this call may end before the task
    asio::post(io_, [this, filter, ended] {
      CloseConnectionsIf(filter);
      ended->Notify();
    });
    ended->WaitFor(timeout);
  }

  void Shutdown() {
    if (!thread_.joinable()) return;
    asio::post(io_, [this] { Close(); });
    thread_.join();
    if (claim_ == nullptr) unlink(path_.c_str());
    claim_.reset();
  }

 private:
  class Connection;

  // Runs the event loop until Close. A handler that runs out of memory loses its connection, not
  // the broker.
  void Run() {
    while (true) {
      try {
        io_.run();
        return;
      } catch (const std::exception& error) {
        parts_.log.Error("broker_exception", {{"message", error.what()}});
      }
    }
  }

  void Accept();
  void Close();
  void CloseConnectionsIf(const SessionFilter& filter);
  // Returns the number of connections of a user that have not opened a session yet.
  size_t UnopenedOf(uid_t uid) const;

  const Parts parts_;
  const uint64_t boot_word_;
  std::unique_ptr<SocketClaim> claim_;  // null = the supervisor holds the claim
  std::string path_;
  asio::io_context io_{1};
  stream_protocol::acceptor acceptor_;
  asio::steady_timer pause_;
  bool cannot_accept_ = false;  // the last accept has failed
  ShortageLog shortages_;
  std::set<std::shared_ptr<Connection>> connections_;  // used on the broker's thread only
  std::thread thread_;
};

// Connection serves one client: reads a request, answers it, reads the next. All of it runs on the
// broker's thread.
class Broker::Impl::Connection : public std::enable_shared_from_this<Connection> {
 public:
  Connection(Impl& broker, stream_protocol::socket socket)
      : broker_(broker), socket_(std::move(socket)), timer_(broker.io_) {}

  // Ends the client's session, if one is open.
  ~Connection() { EndSession(); }

  void Start(bool refused) {
    ucred peer = {};
    socklen_t size = sizeof(peer);
    if (getsockopt(socket_.native_handle(), SOL_SOCKET, SO_PEERCRED, &peer, &size) != 0) {
      Close();
      return;
    }
    peer_ = peer;
    const bool too_many = broker_.UnopenedOf(peer_.uid) > kMaxUnopenedOfUid;
    if (refused || too_many) {
      Fail(refused ? ResourceExhausted(
                         "max_sessions",
                         absl::StrCat(broker_.parts_.config.max_sessions,
                                      ", and too many connections have not opened a session"),
                         kRetryMemory)
                   : ResourceExhausted(
                         "connections",
                         absl::StrCat("more than ", kMaxUnopenedOfUid, " connections of uid ",
                                      peer_.uid, " have not opened a session"),
                         kRetryQueue));
      closing_ = true;
      Write();
      return;
    }
    ReadRequest();
  }

  bool HasSession() const { return !token_.empty(); }
  bool HasSessionIf(const SessionFilter& filter) const { return HasSession() && filter(session_); }
  uid_t uid() const { return peer_.uid; }

  // Closes the socket, and ends the session or leaves it to the next worker. Pending operations on
  // the socket fail.
  void Close() {
    error_code ignored;
    timer_.cancel();
    const bool left = EndSession() == Ending::kLeftToNextWorker;
    // The supervisor may hold a duplicate of the socket, so close() alone does not end the
    // connection. The read side of a connection that is left to the next worker stays open, so that
    // the end of the client can be observed.
    socket_.shutdown(left ? asio::socket_base::shutdown_send : asio::socket_base::shutdown_both,
                     ignored);
    socket_.close(ignored);
    broker_.connections_.erase(shared_from_this());
  }

 private:
  enum class Ending { kEnded, kLeftToNextWorker };

  // Reads the next request. An open session may wait for the first byte of a request without limit;
  // the rest of a request has a deadline, and so has hello.
  void ReadRequest() {
    const bool open = !token_.empty();
    if (!open) SetDeadline();
    const size_t at_least = open ? 1 : sizeof(request_);
    asio::async_read(socket_, asio::buffer(&request_, sizeof(request_)),
                     asio::transfer_at_least(at_least),
                     [self = shared_from_this()](const error_code& error, size_t got) {
                       self->OnRead(error, got);
                     });
  }

  void OnRead(const error_code& error, size_t got) {
    // A reset connection means that the client closed it before it had read the last reply.
    if (got > 0 || error == asio::error::eof) resume_unread_ = false;
    if (error) {
      Close();
      return;
    }
    if (got < sizeof(request_)) {
      SetDeadline();
      asio::async_read(
          socket_, asio::buffer(reinterpret_cast<char*>(&request_) + got, sizeof(request_) - got),
          [self = shared_from_this(), got](const error_code& later, size_t more) {
            self->OnRead(later, got + more);
          });
      return;
    }
    ClearDeadline();
    if (request_.magic != BrokerRequest::kMagic) {
      Close();  // the peer speaks another protocol
      return;
    }
    reply_ = BrokerReply{};
    reply_.call = request_.call;
    const absl::Status status = Guarded([this] { return Handle(); });
    broker_.shortages_.Note("broker", status);
    Fail(status);
    Write();
  }

  absl::Status Handle() {
    if (request_.version != kvstore::kBrokerVersion) {
      closing_ = true;
      return Unimplemented("version",
                           absl::StrCat(request_.version, ", must be ", kvstore::kBrokerVersion));
    }
    if (request_.reserved != 0 || request_.reserved2 != 0) {
      return InvalidArgument("reserved", "must be 0");
    }
    if (request_.call == BrokerCall::kHello) return Hello();
    if (request_.call == BrokerCall::kResume) return Resume();
    if (token_.empty()) return FailedPrecondition("call", "the first call must be hello");
    if (request_.call == BrokerCall::kHoldPool) {
      return broker_.parts_.store.HoldPool(session_.tenant, session_.id, request_.cache_id);
    }
    absl::StatusOr<kvstore::SharedMemory> shared =
        Unimplemented("call", absl::StrCat(static_cast<uint32_t>(request_.call)));
    if (request_.call == BrokerCall::kOpenPool) {
      shared = broker_.parts_.store.OpenPool(session_.tenant, session_.id, request_.cache_id);
    } else if (request_.call == BrokerCall::kOpenStaging) {
      shared = broker_.parts_.store.OpenStaging(session_.tenant, session_.id, request_.slot_bytes,
                                                request_.slot_count);
    }
    if (!shared.ok()) return shared.status();
    if (request_.call == BrokerCall::kOpenStaging) KeepStaging(shared->descriptor.get());
    Share(*std::move(shared));
    return absl::OkStatus();
  }

  absl::Status Hello() {
    if (!token_.empty()) return FailedPrecondition("call", "the session is already open");
    std::string tenant;
    std::string client_name;
    if (!TextOf(request_.tenant, tenant)) return InvalidArgument("tenant", "not zero-terminated");
    if (!TextOf(request_.client_name, client_name)) {
      return InvalidArgument("client_name", "not zero-terminated");
    }
    const Parts& parts = broker_.parts_;
    const absl::StatusOr<std::string> allowed =
        parts.config.tenant_uids.TenantOf(peer_.uid, tenant);
    if (!allowed.ok()) {
      parts.log.Warning("session_denied", {{"uid", peer_.uid}, {"pid", peer_.pid}});
      return allowed.status();
    }
    ASSIGN_OR_RETURN(const OpenedSession opened,
                     parts.sessions.Open(*allowed, client_name, static_cast<uint32_t>(peer_.pid)));
    const Session& session = opened.session;
    absl::Status status =
        parts.store.KeepSession({session.id, session.tenant, session.client_name, opened.token});
    if (status.ok()) status = Open(opened);
    if (status.ok()) {
      LogSession("session_opened");
    } else if (parts.sessions.Close(opened.token)) {
      parts.store.DropSession(session.id);
    }
    return status;
  }

  absl::Status Resume() {
    if (!token_.empty()) return FailedPrecondition("call", "the session is already open");
    std::string token;
    if (!TextOf(request_.resume_token, token)) {
      return InvalidArgument("resume_token", "not zero-terminated");
    }
    const Parts& parts = broker_.parts_;
    if (const absl::StatusOr<Session> known = parts.sessions.Find(token); known.ok()) {
      ASSIGN_OR_RETURN(const std::string allowed,
                       parts.config.tenant_uids.TenantOf(peer_.uid, known->tenant));
    }
    ASSIGN_OR_RETURN(const OpenedSession resumed,
                     parts.sessions.Resume(token, static_cast<uint32_t>(peer_.pid)));
    if (absl::Status status = Open(resumed); !status.ok()) {
      parts.sessions.Detach(token);
      parts.detached.AwaitResume(resumed);
      return status;
    }
    resume_unread_ = true;
    LogSession("session_resumed");
    return absl::OkStatus();
  }

  void LogSession(absl::string_view event) const {
    broker_.parts_.log.Info(event, {{"session", session_.id},
                                    {"tenant", session_.tenant},
                                    {"uid", peer_.uid},
                                    {"pid", peer_.pid}});
  }

  // Binds the connection to the session, and fills the reply with the session's data.
  absl::Status Open(const OpenedSession& opened) {
    const Parts& parts = broker_.parts_;
    ASSIGN_OR_RETURN(
        auto memory,
        parts.store.OpenLocalSession(opened.session.tenant, opened.session.id, broker_.boot_word_));
    session_ = opened.session;
    if (absl::Status status = Keep(memory.keeper_control.get()); !status.ok()) {
      parts.log.Warning("session_not_kept",
                        {{"session", session_.id}, {"message", status.message()}});
      ReleaseKept();
      return status;
    }
    token_ = opened.token;
    SetText(reply_.session_token, token_);
    SetText(reply_.boot_id, parts.boot_id);
    SetText(reply_.tenant, session_.tenant);
    reply_.boot_word = broker_.boot_word_;
    reply_.max_message_bytes = parts.config.max_message_bytes;
    Share(std::move(memory.control));
    return absl::OkStatus();
  }

  absl::Status Keep(int control) {
    const SessionKeepers& keepers = broker_.parts_.keepers;
    const std::string name = ControlName(broker_.parts_.boot_id, session_.number);
    absl::Status status;
    if (keepers.memory != nullptr) status = keepers.memory->Keep(name, control);
    const bool separate = keepers.connections != keepers.memory;
    // On a full volume the memory is no file. Then only the supervisor can mark it as ended.
    if (separate && absl::IsFailedPrecondition(status)) status = absl::OkStatus();
    if (!status.ok() || keepers.connections == nullptr) return status;
    // When memory is kept in files, the supervisor needs a copy of this descriptor, too.
    if (separate) status = keepers.connections->Keep(name, control);
    if (!status.ok()) return status;
    return keepers.connections->Keep(SocketName(broker_.parts_.boot_id, session_.number),
                                     socket_.native_handle());
  }

  // Without it, a ring whose worker is killed occupies memory until its client has closed it.
  void KeepStaging(int ring) const {
    kvstore::DescriptorKeeper* keeper = broker_.parts_.keepers.connections;
    if (keeper == nullptr) return;
    const std::string name = StagingName(broker_.parts_.boot_id, session_.number);
    if (const absl::Status status = keeper->Keep(name, ring); !status.ok()) {
      broker_.parts_.log.Warning("staging_not_kept",
                                 {{"session", session_.id}, {"message", status.message()}});
    }
  }

  void ReleaseKept() const {
    const SessionKeepers& keepers = broker_.parts_.keepers;
    for (kvstore::DescriptorKeeper* keeper : {keepers.memory, keepers.connections}) {
      if (keeper == nullptr) continue;
      keeper->Release(SocketName(broker_.parts_.boot_id, session_.number)).IgnoreError();
      keeper->Release(ControlName(broker_.parts_.boot_id, session_.number)).IgnoreError();
      keeper->Release(StagingName(broker_.parts_.boot_id, session_.number)).IgnoreError();
    }
  }

  void Share(kvstore::SharedMemory memory) {
    reply_.size_bytes = memory.size_bytes;
    descriptor_ = std::move(memory.descriptor);
  }

  void Fail(const absl::Status& status) {
    reply_.status = static_cast<uint32_t>(status.code());
    SetText(reply_.message, TextOf(status));
    SetText(reply_.field, FieldOf(status));
    reply_.retry_ms = RetryMsOf(status);
  }

  void Write() {
    sent_ = 0;
    SetDeadline();
    WriteRest();
  }

  void WriteRest() {
    while (sent_ < sizeof(reply_)) {
      const ssize_t wrote = SendPart(socket_.native_handle(), reply_, sent_, descriptor_.get());
      if (wrote > 0) {
        sent_ += static_cast<size_t>(wrote);
      } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
        socket_.async_wait(stream_protocol::socket::wait_write,
                           [self = shared_from_this()](const error_code& error) {
                             error ? self->Close() : self->WriteRest();
                           });
        return;
      } else if (errno != EINTR) {
        Close();
        return;
      }
    }
    ClearDeadline();
    descriptor_ = kvstore::FileDescriptor();
    closing_ ? Close() : ReadRequest();
  }

  void SetDeadline() {
    timer_.expires_after(absl::ToChronoNanoseconds(broker_.parts_.config.default_timeout));
    timer_.async_wait([weak = weak_from_this()](const error_code& error) {
      const auto self = weak.lock();
      if (error || self == nullptr) return;
      // The deadline may have been cleared after this handler was queued.
      if (self->timer_.expiry() <= std::chrono::steady_clock::now()) self->Close();
    });
  }

  void ClearDeadline() { timer_.expires_at(std::chrono::steady_clock::time_point::max()); }

  Ending EndSession() {
    if (token_.empty()) return Ending::kEnded;
    const Parts& parts = broker_.parts_;
    const std::string token = std::exchange(token_, {});
    if (resume_unread_) {  // the client will resume the session
      ReleaseKept();
      parts.sessions.Detach(token);
      parts.detached.AwaitResume({token, session_});
      return Ending::kEnded;
    }
    if (!parts.sessions.Close(token)) return Ending::kLeftToNextWorker;
    ReleaseKept();
    const auto drop = [&store = parts.store, &log = parts.log, session = session_] {
      const uint32_t dropped = store.DropSession(session.id);
      log.Info(
          "session_ended",
          {{"session", session.id}, {"tenant", session.tenant}, {"sequences_dropped", dropped}});
    };
    parts.cleanups.Run({.tenant = session_.tenant, .lane = Lane::kBrief, .run = drop});
    return Ending::kEnded;
  }

  Impl& broker_;  // outlives its connections
  stream_protocol::socket socket_;
  asio::steady_timer timer_;
  ucred peer_ = {};
  BrokerRequest request_;
  BrokerReply reply_;
  kvstore::FileDescriptor descriptor_;  // sent with the reply
  size_t sent_ = 0;
  bool closing_ = false;        // close the connection after the reply
  bool resume_unread_ = false;  // true until the reply to kResume is known to have arrived
  std::string token_;           // empty until hello
  Session session_;
};

void Broker::Impl::Accept() {
  acceptor_.async_accept([this](const error_code& error, stream_protocol::socket socket) {
    if (!acceptor_.is_open()) return;
    if (error) {
      if (!std::exchange(cannot_accept_, true)) {
        parts_.log.Warning("cannot_accept", {{"socket", path_}, {"message", error.message()}});
      }
      pause_.expires_after(kAcceptPause);
      pause_.async_wait([this](const error_code& cancelled) {
        if (!cancelled) Accept();
      });
      return;
    }
    cannot_accept_ = false;
    const bool refused = connections_.size() >= parts_.config.max_sessions + kMaxUnopened;
    const auto connection = std::make_shared<Connection>(*this, std::move(socket));
    connections_.insert(connection);
    Accept();
    connection->Start(refused);
  });
}

void Broker::Impl::Close() {
  error_code ignored;
  acceptor_.close(ignored);
  pause_.cancel();
  const std::set<std::shared_ptr<Connection>> all = connections_;
  for (const auto& connection : all) connection->Close();
}

void Broker::Impl::CloseConnectionsIf(const SessionFilter& filter) {
  const std::set<std::shared_ptr<Connection>> all = connections_;
  for (const auto& connection : all) {
    if (connection->HasSessionIf(filter)) connection->Close();
  }
}

size_t Broker::Impl::UnopenedOf(uid_t uid) const {
  return static_cast<size_t>(
      std::count_if(connections_.begin(), connections_.end(), [&](const auto& connection) {
        return !connection->HasSession() && connection->uid() == uid;
      }));
}

absl::StatusOr<std::unique_ptr<Broker>> Broker::Start(Parts parts, const std::string& socket_path) {
  const std::string path = BrokerPath(socket_path);
  absl::StatusOr<std::unique_ptr<SocketClaim>> claim = std::unique_ptr<SocketClaim>();
  if (!parts.claimed) claim = SocketClaim::Acquire(path);
  if (!claim.ok()) return claim.status();
  auto impl = std::make_shared<Impl>(std::move(parts), *std::move(claim));
  RETURN_IF_ERROR(impl->Listen(path));
  return std::unique_ptr<Broker>(new Broker(std::move(impl)));
}

Broker::Broker(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}

Broker::~Broker() { Shutdown(); }

bool Broker::IsResponsive(absl::Duration timeout) { return impl_->IsResponsive(timeout); }

void Broker::EndSessionsIf(const SessionFilter& filter, absl::Duration timeout) {
  impl_->EndSessionsIf(filter, timeout);
}

void Broker::Shutdown() { impl_->Shutdown(); }

}  // namespace pqcached::service

#include "service/rpc/session_rpc.h"

#include <algorithm>
#include <atomic>
#include <optional>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/base/status_macros.h"
#include "kvstore/clock.h"
#include "service/base/refusal.h"
#include "service/rpc/grpc_status.h"
#include "service/rpc/kv_cache_service.h"

namespace pqcached::service {

using kvstore::SteadyTime;

namespace {

// Number of streams beyond max_sessions that may be open: streams that have not sent `open` yet,
// and streams about to end.
constexpr size_t kMaxUnopenedStreams = 64;
// Number of streams of one connection that may be open without a session.
constexpr size_t kMaxUnopenedOfConnection = 16;

}  // namespace

// SessionStream is one client's session. The session and its sequences end with the stream.
class SessionStream final : public grpc::ServerBidiReactor<v1::SessionRequest, v1::SessionEvent>,
                            public std::enable_shared_from_this<SessionStream> {
 public:
  SessionStream(const KvCacheService::Parts& parts, SessionStreams& streams, std::string connection)
      : parts_(parts),
        streams_(streams),
        connection_(std::move(connection)),
        alarm_(parts.calls.alarms()) {}

  // Returns whether the stream has come over this connection, and has no session.
  bool IsUnopenedOf(const std::string& connection) const {
    return !opened_.load(std::memory_order_relaxed) && connection_ == connection;
  }

  void Start(const grpc::CallbackServerContext& context) {
    const size_t streams = streams_.Add(shared_from_this());
    if (absl::Status status = ReadCaller(context); !status.ok()) {
      FinishOnce(status);
    } else if (parts_.calls.gate().draining()) {
      FinishOnce(Unavailable("", "the sidecar is shutting down", kRetryMemory));
    } else if (streams > parts_.config.max_sessions + kMaxUnopenedStreams) {
      FinishOnce(ResourceExhausted(
          "max_sessions",
          absl::StrCat(parts_.config.max_sessions, ", and ", streams, " streams are open"),
          kRetryMemory));
    } else if (streams_.UnopenedOf(connection_) > kMaxUnopenedOfConnection) {
      FinishOnce(ResourceExhausted("open",
                                   absl::StrCat("more than ", kMaxUnopenedOfConnection,
                                                " streams of the connection have no session"),
                                   kRetryQueue));
    } else {
      absl::MutexLock lock(&mutex_);
      SetAlarm(parts_.config.default_timeout, &SessionStream::EndUnopened);
      StartRead(&request_);
    }
  }

  // Ends the stream with `status`. No effect when it has ended already.
  void FinishOnce(const absl::Status& status) {
    absl::MutexLock lock(&mutex_);
    if (finished_) return;
    finished_ = true;
    outcome_ = status.code();
    alarm_.Cancel();
    Finish(ToGrpc(status));
  }

  // Closes the session, if there is one and `filter` is true for it, and ends the stream with
  // `status`.
  void EndIf(const SessionFilter& filter, const absl::Status& status) {
    {
      absl::MutexLock lock(&mutex_);
      if (session_.token.empty() || !filter(session_.session)) return;
      resume_unread_ = false;  // it cannot be resumed
    }
    CloseSession();
    FinishOnce(status);
  }

  void OnReadDone(bool ok) override {
    // A failed read means that the client has ended its side or disconnected.
    const absl::Status status = ok ? Handle() : absl::OkStatus();
    {
      absl::MutexLock lock(&mutex_);
      if (ok && status.ok()) {
        if (!finished_) StartRead(&request_);
        return;
      }
      if (writing_ && resume_unread_) {
        // The client may have received the reply and ended its side before OnWriteDone is called,
        // which decides whether the session is closed or detached.
        ending_ = status;
        return;
      }
    }
    End(status);
  }

  void OnWriteDone(bool ok) override {
    std::optional<absl::Status> ending;
    {
      absl::MutexLock lock(&mutex_);
      writing_ = false;
      if (ok) resume_unread_ = false;
      ending.swap(ending_);
    }
    if (ending.has_value()) End(*ending);
  }

  void OnDone() override {
    parts_.calls.RunCleanup(session_.session.tenant, [self = shared_from_this()] {
      self->CloseSession();
      self->parts_.stats.Record(Rpc::kSession, self->outcome_, SteadyTime::Now() - self->started_);
      self->streams_.Remove(self);
    });
  }

 private:
  // Remembers what authorizes the caller, and checks it.
  absl::Status ReadCaller(const grpc::CallbackServerContext& context) {
    if (parts_.entrance.door == Door::kTls) {
      client_ = parts_.entrance.client_of(connection_);
      if (client_ == nullptr) return Cancelled("the connection has ended");
      authorization_ =
          std::string(ArrivalOf(context, parts_.entrance, client_.get()).authorization);
    }
    ASSIGN_OR_RETURN(identity_, CheckCaller());
    return absl::OkStatus();
  }

  // Checks whether the caller may have a session: its token may be withdrawn at any time.
  absl::StatusOr<std::optional<Identity>> CheckCaller() {
    CallGate::Arrival arrival;
    arrival.door = parts_.entrance.door;
    arrival.authorization = authorization_;
    if (client_ != nullptr && client_->identity.has_value()) {
      arrival.certificate = &*client_->identity;
    }
    absl::StatusOr<std::optional<Identity>> identity =
        parts_.calls.gate().AuthorizeSession(arrival);
    NoteDenied(identity.status());
    return identity;
  }

  void NoteDenied(const absl::Status& status) {
    parts_.calls.gate().NoteDenied(Rpc::kSession, parts_.entrance.door,
                                   client_ == nullptr ? "" : client_->address, status);
  }

  absl::Status Handle() {
    switch (request_.request_case()) {
      case v1::SessionRequest::kOpen:
        return Open(request_.open());
      case v1::SessionRequest::kHeartbeat:
        return session_.token.empty() ? InvalidArgument("open", "must come first")
                                      : absl::OkStatus();
      case v1::SessionRequest::REQUEST_NOT_SET:
        break;
    }
    return InvalidArgument("request", "missing: open or heartbeat");
  }

  absl::Status Open(const v1::SessionOpen& open) {
    if (!session_.token.empty()) return InvalidArgument("open", "the session is already open");
    absl::StatusOr<OpenedSession> result = parts_.handlers.sessions.Open(open, identity_);
    NoteDenied(result.status());
    ASSIGN_OR_RETURN(OpenedSession opened, std::move(result));
    absl::MutexLock lock(&mutex_);
    session_ = std::move(opened);
    opened_.store(true, std::memory_order_relaxed);
    resume_unread_ = !open.resume_token().empty();
    if (finished_) return absl::OkStatus();
    v1::SessionOpened* message = event_.mutable_opened();
    message->set_session_token(session_.token);
    message->set_boot_id(parts_.boot_id);
    message->set_max_message_bytes(parts_.config.max_message_bytes);
    writing_ = true;
    StartWrite(&event_);
    SetAlarm(parts_.config.heartbeat_interval, &SessionStream::Beat);
    return absl::OkStatus();
  }

  // The callback holds the stream weakly, because the stream owns the alarm, which owns the
  // callback.
  void SetAlarm(absl::Duration after, void (SessionStream::*action)())
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    alarm_.Set(SteadyTime::Now() + after, [weak = weak_from_this(), action] {
      if (const auto self = weak.lock(); self != nullptr) ((*self).*action)();
    });
  }

  void Beat() {
    absl::MutexLock lock(&mutex_);
    if (finished_) return;  // parts_ may be gone
    if (const auto caller = CheckCaller(); !caller.ok()) return End(caller.status());
    if (!writing_) {  // no second heartbeat while the client does not read
      event_.mutable_heartbeat();
      writing_ = true;
      StartWrite(&event_);
    }
    SetAlarm(parts_.config.heartbeat_interval, &SessionStream::Beat);
  }

  void EndUnopened() {
    {
      absl::MutexLock lock(&mutex_);
      if (!session_.token.empty()) return;
    }
    FinishOnce(DeadlineExceeded("open", "was not received within default_timeout"));
  }

  // Ends the stream after its session. The session is closed first, so that a client that observes
  // the end of its stream can open another session in its place.
  void End(const absl::Status& status) {
    parts_.calls.RunCleanup(session_.session.tenant, [self = shared_from_this(), status] {
      self->CloseSession();
      self->FinishOnce(status);
    });
  }

  void CloseSession() {
    bool resume_unread = false;
    {
      absl::MutexLock lock(&mutex_);
      if (session_.token.empty() || closed_) return;
      closed_ = true;
      resume_unread = resume_unread_;
    }
    if (resume_unread) {
      parts_.handlers.sessions.Detach(session_);
    } else {
      parts_.handlers.sessions.Close(session_);
    }
  }

  const KvCacheService::Parts& parts_;
  SessionStreams& streams_;
  const std::string connection_;  // its name in gRPC
  // The caller over TLS: written once, in Start.
  std::shared_ptr<const TlsClient> client_;
  std::string authorization_;
  std::optional<Identity> identity_;
  std::atomic<bool> opened_ = false;
  const SteadyTime started_ = SteadyTime::Now();
  v1::SessionRequest request_;
  v1::SessionEvent event_;
  absl::Mutex mutex_;
  // Empty until `open`. Written once, in OnReadDone under mutex_; what runs after that, and
  // OnReadDone itself, reads it unlocked.
  OpenedSession session_;
  Alarm alarm_ ABSL_GUARDED_BY(mutex_);
  absl::StatusCode outcome_ = absl::StatusCode::kOk;  // written before Finish, read after OnDone
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  bool finished_ ABSL_GUARDED_BY(mutex_) = false;
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;
  bool resume_unread_ ABSL_GUARDED_BY(mutex_) = false;  // the reply to a resume is not written yet
  std::optional<absl::Status> ending_ ABSL_GUARDED_BY(mutex_);  // End with it when that is written
};

size_t SessionStreams::Add(std::shared_ptr<SessionStream> stream) {
  absl::MutexLock lock(&mutex_);
  streams_.insert(std::move(stream));
  return streams_.size();
}

void SessionStreams::Remove(const std::shared_ptr<SessionStream>& stream) {
  absl::MutexLock lock(&mutex_);
  streams_.erase(stream);
}

size_t SessionStreams::UnopenedOf(const std::string& connection) const {
  absl::MutexLock lock(&mutex_);
  return static_cast<size_t>(
      std::count_if(streams_.begin(), streams_.end(),
                    [&](const auto& stream) { return stream->IsUnopenedOf(connection); }));
}

std::vector<std::shared_ptr<SessionStream>> SessionStreams::All() const {
  absl::MutexLock lock(&mutex_);
  return {streams_.begin(), streams_.end()};
}

void KvCacheService::EndSessions(const absl::Status& status) {
  for (const std::shared_ptr<SessionStream>& stream : streams_->All()) stream->FinishOnce(status);
}

void KvCacheService::EndSessionsIf(const SessionFilter& filter, const absl::Status& status) {
  for (const std::shared_ptr<SessionStream>& stream : streams_->All()) {
    stream->EndIf(filter, status);
  }
}

grpc::ServerBidiReactor<v1::SessionRequest, v1::SessionEvent>* KvCacheService::Session(
    Context* context) {
  const auto stream = std::make_shared<SessionStream>(parts_, *streams_, context->peer());
  stream->Start(*context);
  return stream.get();  // streams_ holds it until OnDone
}

}  // namespace pqcached::service

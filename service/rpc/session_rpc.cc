#include "service/rpc/session_rpc.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "kvstore/clock.h"
#include "service/base/log.h"
#include "service/base/refusal.h"
#include "service/base/version.h"
#include "service/rpc/grpc_status.h"
#include "service/rpc/kv_cache_service.h"
#include "service/wire/wire.h"

namespace pqcached::service {

using kvstore::SteadyTime;

namespace {

// Number of streams beyond max_sessions that may be open: streams that have not sent `open` yet,
// and streams about to end.
constexpr size_t kMaxUnopenedStreams = 64;

// Returns an error of Sessions with its path in SessionRequest. A limit of the sidecar is no field
// of it.
absl::Status UnderOpen(const absl::Status& status) {
  return absl::IsResourceExhausted(status) ? status : PrefixField("open", status);
}

}  // namespace

// SessionStream is one client's session. The session and its sequences end with the stream.
class SessionStream final : public grpc::ServerBidiReactor<v1::SessionRequest, v1::SessionEvent>,
                            public std::enable_shared_from_this<SessionStream> {
 public:
  struct Parts {
    const Config& config;
    const std::string& boot_id;
    kvstore::Store& store;
    Sessions& sessions;
    RpcStats& stats;
    Calls& calls;
    Log& log;
    SessionStreams& streams;
    DetachedSessions& detached;
  };

  explicit SessionStream(Parts parts) : parts_(parts), alarm_(parts.calls.alarms()) {}

  void Start() {
    const size_t streams = parts_.streams.Add(shared_from_this());
    if (parts_.calls.draining()) {
      FinishOnce(Unavailable("", "the sidecar is shutting down", kRetryMemory));
    } else if (streams > parts_.config.max_sessions + kMaxUnopenedStreams) {
      FinishOnce(ResourceExhausted(
          "max_sessions",
          absl::StrCat(parts_.config.max_sessions, ", and ", streams, " streams are open"),
          kRetryMemory));
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

  void OnReadDone(bool ok) override {
    // A failed read means that the client has ended its side or disconnected.
    const absl::Status status = ok ? Handle() : absl::OkStatus();
    if (!ok || !status.ok()) {
      // The session is closed first, so that a client that observes the end of its stream can open
      // another session in its place.
      parts_.calls.RunCleanup([self = shared_from_this(), status] {
        self->CloseSession();
        self->FinishOnce(status);
      });
      return;
    }
    absl::MutexLock lock(&mutex_);
    if (!finished_) StartRead(&request_);
  }

  void OnWriteDone(bool ok) override {
    absl::MutexLock lock(&mutex_);
    writing_ = false;
    if (ok) resume_unread_ = false;
  }

  void OnDone() override {
    parts_.calls.RunCleanup([self = shared_from_this()] {
      self->CloseSession();
      self->parts_.stats.Record(Rpc::kSession, self->outcome_, SteadyTime::Now() - self->started_);
      self->parts_.streams.Remove(self);
    });
  }

 private:
  absl::Status Handle() {
    switch (request_.request_case()) {
      case v1::SessionRequest::kOpen:
        return Open(request_.open());
      case v1::SessionRequest::kHeartbeat:
        return token_.empty() ? InvalidArgument("open", "must come first") : absl::OkStatus();
      case v1::SessionRequest::REQUEST_NOT_SET:
        break;
    }
    return InvalidArgument("request", "missing: open or heartbeat");
  }

  absl::Status Open(const v1::SessionOpen& open) {
    if (!token_.empty()) return InvalidArgument("open", "the session is already open");
    if (open.protocol_version() != kProtocolVersion) {
      return InvalidArgument("open.protocol_version",
                             absl::StrCat(open.protocol_version(), ", must be ", kProtocolVersion));
    }
    const bool resumes = !open.resume_token().empty();
    const absl::StatusOr<OpenedSession> opened = resumes ? Resume(open) : OpenNew(open);
    if (!opened.ok()) return opened.status();
    absl::MutexLock lock(&mutex_);
    token_ = opened->token;
    session_ = opened->session;
    resume_unread_ = resumes;
    parts_.log.Info(resumes ? "session_resumed" : "session_opened",
                    {{"session", session_.id}, {"tenant", session_.tenant}});
    if (finished_) return absl::OkStatus();
    v1::SessionOpened* message = event_.mutable_opened();
    message->set_session_token(token_);
    message->set_boot_id(parts_.boot_id);
    message->set_max_message_bytes(parts_.config.max_message_bytes);
    writing_ = true;
    StartWrite(&event_);
    SetAlarm(parts_.config.heartbeat_interval, &SessionStream::Beat);
    return absl::OkStatus();
  }

  // Refuses tenants that are bound to uids, because gRPC does not provide the peer's uid.
  absl::Status CheckTenant(absl::string_view tenant) const {
    if (!parts_.config.tenant_uids.Binds(std::string(tenant))) return absl::OkStatus();
    return PermissionDenied("open.tenant",
                            "is bound to uids (tenant_uids); open its sessions through the broker");
  }

  absl::StatusOr<OpenedSession> OpenNew(const v1::SessionOpen& open) {
    absl::Status status = CheckTenant(open.tenant().empty() ? "default" : open.tenant());
    if (!status.ok()) return status;
    absl::StatusOr<OpenedSession> opened = parts_.sessions.Open(open.tenant(), open.client_name());
    if (!opened.ok()) return UnderOpen(opened.status());
    const Session& session = opened->session;
    status =
        parts_.store.KeepSession({session.id, session.tenant, session.client_name, opened->token});
    if (status.ok()) return opened;
    parts_.sessions.Close(opened->token);
    return status;
  }

  absl::StatusOr<OpenedSession> Resume(const v1::SessionOpen& open) {
    if (const absl::StatusOr<Session> known = parts_.sessions.Find(open.resume_token());
        known.ok()) {
      if (absl::Status status = CheckTenant(known->tenant); !status.ok()) return status;
    }
    absl::StatusOr<OpenedSession> resumed = parts_.sessions.Resume(open.resume_token());
    if (resumed.ok()) return resumed;
    return UnderOpen(resumed.status());
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
    if (finished_) return;
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
      if (!token_.empty()) return;
    }
    FinishOnce(DeadlineExceeded("open", "was not received within default_timeout"));
  }

  void CloseSession() {
    Session session;
    {
      absl::MutexLock lock(&mutex_);
      if (token_.empty() || closed_) return;
      closed_ = true;
      session = session_;
      if (resume_unread_) {  // the client will resume the session
        parts_.sessions.Detach(token_);
        parts_.detached.AwaitResume({token_, session});
        return;
      }
      if (!parts_.sessions.Close(token_)) return;  // false: left to the next worker
    }
    const uint32_t dropped = parts_.store.DropSession(session.id);
    parts_.log.Info(
        "session_ended",
        {{"session", session.id}, {"tenant", session.tenant}, {"sequences_dropped", dropped}});
  }

  const Parts parts_;
  const SteadyTime started_ = SteadyTime::Now();
  v1::SessionRequest request_;
  v1::SessionEvent event_;
  absl::Mutex mutex_;
  std::string token_;  // written in OnReadDone under mutex_; only OnReadDone reads it unlocked
  Session session_ ABSL_GUARDED_BY(mutex_);
  Alarm alarm_ ABSL_GUARDED_BY(mutex_);
  absl::StatusCode outcome_ = absl::StatusCode::kOk;  // written before Finish, read after OnDone
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  bool finished_ ABSL_GUARDED_BY(mutex_) = false;
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;
  bool resume_unread_ ABSL_GUARDED_BY(mutex_) = false;  // the reply to a resume is not written yet
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

std::vector<std::shared_ptr<SessionStream>> SessionStreams::All() const {
  absl::MutexLock lock(&mutex_);
  return {streams_.begin(), streams_.end()};
}

KvCacheService::KvCacheService(const Config& config, std::string boot_id, kvstore::Store& store,
                               Sessions& sessions, RpcStats& stats, Calls& calls, Log& log,
                               DetachedSessions& detached)
    : config_(config),
      boot_id_(std::move(boot_id)),
      store_(store),
      sessions_(sessions),
      stats_(stats),
      calls_(calls),
      log_(log),
      detached_(detached),
      streams_(std::make_unique<SessionStreams>()) {}

KvCacheService::~KvCacheService() = default;

void KvCacheService::EndSessions(const absl::Status& status) {
  for (const std::shared_ptr<SessionStream>& stream : streams_->All()) stream->FinishOnce(status);
}

grpc::ServerBidiReactor<v1::SessionRequest, v1::SessionEvent>* KvCacheService::Session(Context*) {
  const auto stream = std::make_shared<SessionStream>(SessionStream::Parts{
      config_, boot_id_, store_, sessions_, stats_, calls_, log_, *streams_, detached_});
  stream->Start();
  return stream.get();  // streams_ holds it until OnDone
}

}  // namespace pqcached::service

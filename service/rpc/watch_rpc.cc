// WatchEvents streams the events of a cache. A stream that waits occupies no thread: a timer looks
// for news, and a serving thread reads them.
#include <atomic>
#include <optional>
#include <utility>

#include "kernels/base/status_macros.h"
#include "kvstore/clock.h"
#include "service/base/guarded.h"
#include "service/base/refusal.h"
#include "service/rpc/grpc_status.h"
#include "service/rpc/kv_cache_service.h"

namespace pqcached::service {
namespace {

using kvstore::SteadyTime;

// Longest time until a stream notices news, the end of its session, or its cancellation.
constexpr absl::Duration kPollInterval = absl::Milliseconds(50);

class WatchStream final : public grpc::ServerWriteReactor<v1::CacheEvents>,
                          public std::enable_shared_from_this<WatchStream> {
 public:
  WatchStream(SequenceHandlers& handlers, Calls& calls, absl::Duration max_idle,
              const v1::WatchEventsRequest& request)
      : handlers_(handlers),
        calls_(calls),
        max_idle_(max_idle),
        request_(request),
        alarm_(calls.alarms()) {}

  void Start(grpc::CallbackServerContext* context, const Entrance& entrance) {
    self_ = shared_from_this();
    context_ = context;
    absl::StatusOr<Call> call = calls_.Begin(context, Rpc::kWatchEvents, entrance);
    if (!call.ok()) {
      Finish(ToGrpc(call.status()));
      return;
    }
    call_ = *std::move(call);
    call_.is_cancelled = [this] { return cancelled_.load(std::memory_order_relaxed); };
    if (const absl::Status taken = QueueStep(); !taken.ok()) {
      End(taken);
      return;
    }
    absl::MutexLock lock(&mutex_);
    if (!ended_) SetAlarm(kPollInterval, &WatchStream::Poll);
  }

  void OnCancel() override { cancelled_.store(true, std::memory_order_relaxed); }  // Poll ends it

  void OnWriteDone(bool ok) override {
    {
      absl::MutexLock lock(&mutex_);
      writing_ = false;
      if (ended_) return FinishOnce();
      if (!ok) return EndLocked(Cancelled("the caller has disconnected"));
    }
    if (!QueueStep().ok()) SetBusy(false);  // Poll tries again
  }

  void OnDone() override { self_.reset(); }

 private:
  // Queues the next step. REQUIRES: busy_, so that there is no other one.
  absl::Status QueueStep() {
    const auto self = shared_from_this();
    return calls_.RunServing({.tenant = call_.session.tenant,
                              .run = [self] { self->Step(); },
                              .deadline = call_.deadline,
                              .expire = [self] { self->End(Calls::WaitedTooLong()); }});
  }

  // Reads the next events and sends them.
  void Step() {
    const absl::Status status = Guarded([this]() -> absl::Status {
      RETURN_IF_ERROR(call_.Check());
      if (!watch_.has_value()) {
        ASSIGN_OR_RETURN(watch_, handlers_.BeginWatch(call_, request_));
      }
      return handlers_.ReadEvents(call_, *watch_, &batch_);
    });
    absl::MutexLock lock(&mutex_);
    if (ended_) return;
    if (!status.ok()) return EndLocked(status);
    if (batch_.events().empty()) {
      busy_ = false;
      return;
    }
    writing_ = true;
    StartWrite(&batch_);
  }

  // Ends the stream when its call or its session has ended; else queues a step if there are events.
  void Poll() {
    bool is_mine = false;
    {
      absl::MutexLock lock(&mutex_);
      if (ended_) return;
      is_mine = !busy_;
      busy_ = true;
    }
    bool has_news = false;
    const absl::Status status = Guarded([&]() -> absl::Status {
      RETURN_IF_ERROR(call_.Check());
      if (calls_.gate().draining()) {
        return Unavailable("", "the sidecar is shutting down", kRetryMemory);
      }
      RETURN_IF_ERROR(handlers_.CheckSession(call_));
      if (is_mine) has_news = handlers_.HasEvents(call_, *watch_);
      return absl::OkStatus();
    });
    if (!status.ok()) return End(status);
    const bool is_queued = has_news && QueueStep().ok();
    absl::MutexLock lock(&mutex_);
    if (is_mine && !is_queued) busy_ = false;
    if (!ended_) SetAlarm(kPollInterval, &WatchStream::Poll);
  }

  void SetBusy(bool is_busy) {
    absl::MutexLock lock(&mutex_);
    busy_ = is_busy;
  }

  void End(const absl::Status& status) {
    absl::MutexLock lock(&mutex_);
    EndLocked(status);
  }

  void EndLocked(const absl::Status& status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (ended_) return;
    ended_ = true;
    outcome_ = status;
    calls_.gate().End(call_, status);
    if (!writing_) return FinishOnce();
    SetAlarm(max_idle_, &WatchStream::CancelUnread);
  }

  void FinishOnce() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (finished_) return;
    finished_ = true;
    alarm_.Cancel();
    Finish(ToGrpc(outcome_));
  }

  // Cancels an ended call whose client does not read the last message.
  void CancelUnread() {
    absl::MutexLock lock(&mutex_);
    if (!finished_) context_->TryCancel();
  }

  // The callback holds the stream weakly, because the stream owns the alarm, which owns the
  // callback.
  void SetAlarm(absl::Duration after, void (WatchStream::*action)())
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    alarm_.Set(SteadyTime::Now() + after, [weak = weak_from_this(), action] {
      if (const auto self = weak.lock(); self != nullptr) ((*self).*action)();
    });
  }

  SequenceHandlers& handlers_;
  Calls& calls_;
  const absl::Duration max_idle_;
  const v1::WatchEventsRequest request_;
  grpc::CallbackServerContext* context_ = nullptr;  // alive until the call is finished
  Call call_;
  std::shared_ptr<WatchStream> self_;  // until OnDone
  std::atomic<bool> cancelled_ = false;
  // Used by the only step, or by Poll while there is none (busy_). Set by the first step.
  std::optional<EventWatch> watch_;
  v1::CacheEvents batch_;
  absl::Mutex mutex_;
  Alarm alarm_ ABSL_GUARDED_BY(mutex_);
  absl::Status outcome_ ABSL_GUARDED_BY(mutex_);
  bool busy_ ABSL_GUARDED_BY(mutex_) = true;  // a step is queued, runs, or its message is written
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;
  bool finished_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace

grpc::ServerWriteReactor<v1::CacheEvents>* KvCacheService::WatchEvents(
    Context* context, const v1::WatchEventsRequest* request) {
  const auto stream = std::make_shared<WatchStream>(parts_.handlers.sequences, parts_.calls,
                                                    parts_.config.stream_timeout, *request);
  stream->Start(context, parts_.entrance);
  return stream.get();  // holds itself until OnDone
}

}  // namespace pqcached::service

// BuildIndex is a long call with a stream of progress; it ends early when the client disconnects.
#include <atomic>
#include <deque>
#include <utility>

#include "kernels/base/status_macros.h"
#include "kvstore/clock.h"
#include "service/base/guarded.h"
#include "service/base/log.h"
#include "service/base/refusal.h"
#include "service/rpc/grpc_status.h"
#include "service/rpc/kv_cache_service.h"
#include "service/wire/wire.h"

namespace pqcached::service {
namespace {

using kvstore::SteadyTime;

// Largest number of progress messages that the client has not read yet; beyond it, a newer message
// replaces the last one. It is greater than 1 because the first message may be in transmission.
constexpr size_t kMaxUnsentProgress = 4096;

class BuildStream final : public grpc::ServerWriteReactor<v1::BuildProgress>,
                          public std::enable_shared_from_this<BuildStream> {
 public:
  BuildStream(BuildHandler& handler, Calls& calls, Log& log, absl::Duration max_idle,
              const v1::BuildIndexRequest& request)
      : handler_(handler),
        calls_(calls),
        log_(log),
        max_idle_(max_idle),
        request_(request),
        alarm_(calls.alarms()) {}

  void Start(grpc::CallbackServerContext* context, const Entrance& entrance) {
    self_ = shared_from_this();
    context_ = context;
    absl::StatusOr<Call> call = calls_.Begin(context, Rpc::kBuildIndex, entrance);
    if (!call.ok()) {
      Finish(ToGrpc(call.status()));
      return;
    }
    call_ = *std::move(call);
    call_.is_cancelled = [this] {
      return cancelled_.load(std::memory_order_relaxed) || context_->IsCancelled();
    };
    const auto self = shared_from_this();
    const absl::Status taken =
        calls_.RunBuild({.tenant = call_.session.tenant,
                         .run = [self] { self->End(Guarded([&] { return self->Build(); })); },
                         .deadline = call_.deadline,
                         .expire = [self] { self->End(Calls::WaitedTooLong()); }});
    if (!taken.ok()) End(taken);
  }

  void OnCancel() override { cancelled_.store(true, std::memory_order_relaxed); }

  void OnWriteDone(bool ok) override {
    absl::MutexLock lock(&mutex_);
    if (!ok) {
      cancelled_.store(true, std::memory_order_relaxed);
      unsent_.clear();
    } else {
      unsent_.pop_front();
    }
    writing_ = false;
    WriteOrFinish();
  }

  void OnDone() override { self_.reset(); }

 private:
  absl::Status Build() {
    RETURN_IF_ERROR(call_.Check());
    return handler_.BuildIndex(
        call_, request_, [this](const kvstore::BuildProgress& progress) { Report(progress); });
  }

  void Report(const kvstore::BuildProgress& progress) {
    absl::MutexLock lock(&mutex_);
    if (unsent_.size() < kMaxUnsentProgress) unsent_.emplace_back();
    ToWire(progress, &unsent_.back());
    unsent_.back().set_rebuild(request_.has_rebuild());
    WriteOrFinish();
  }

  void End(const absl::Status& status) {
    absl::Status outcome = status;
    if (status.code() == absl::StatusCode::kCancelled && SteadyTime::Now() >= call_.deadline) {
      outcome = DeadlineExceeded("", "the deadline has passed");
    }
    calls_.gate().End(call_, outcome);
    absl::MutexLock lock(&mutex_);
    ended_ = true;
    outcome_ = std::move(outcome);
    WriteOrFinish();
    if (!finished_) CancelAfter(max_idle_);
  }

  // Cancels the call after `max_idle`, if the client has not read the remaining progress of the
  // finished build by then.
  void CancelAfter(absl::Duration max_idle) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    alarm_.Set(SteadyTime::Now() + max_idle, [weak = weak_from_this()] {
      const auto self = weak.lock();
      if (self == nullptr) return;
      absl::MutexLock lock(&self->mutex_);
      if (self->finished_) return;
      self->log_.Warning("progress_not_read", {{"sequence_id", self->request_.sequence_id()},
                                               {"session", self->call_.session.id},
                                               {"unread", self->unsent_.size()}});
      self->context_->TryCancel();
    });
  }

  void WriteOrFinish() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (writing_) return;
    if (!unsent_.empty() && !cancelled_.load(std::memory_order_relaxed)) {
      writing_ = true;
      StartWrite(&unsent_.front());  // a deque keeps its elements in place
    } else if (ended_ && !finished_) {
      finished_ = true;
      alarm_.Cancel();
      Finish(ToGrpc(outcome_));
    }
  }

  BuildHandler& handler_;
  Calls& calls_;
  Log& log_;
  const absl::Duration max_idle_;
  const v1::BuildIndexRequest& request_;            // alive until the call is finished
  grpc::CallbackServerContext* context_ = nullptr;  // like the request
  Call call_;
  std::shared_ptr<BuildStream> self_;  // until OnDone
  std::atomic<bool> cancelled_ = false;
  absl::Mutex mutex_;
  Alarm alarm_ ABSL_GUARDED_BY(mutex_);
  std::deque<v1::BuildProgress> unsent_ ABSL_GUARDED_BY(mutex_);
  absl::Status outcome_ ABSL_GUARDED_BY(mutex_);
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;
  bool finished_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace

grpc::ServerWriteReactor<v1::BuildProgress>* KvCacheService::BuildIndex(
    Context* context, const v1::BuildIndexRequest* request) {
  const auto stream = std::make_shared<BuildStream>(
      parts_.handlers.builds, parts_.calls, parts_.log, parts_.config.stream_timeout, *request);
  stream->Start(context, parts_.entrance);
  return stream.get();  // holds itself until OnDone
}

}  // namespace pqcached::service

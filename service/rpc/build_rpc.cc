// BuildIndex is a long call with a stream of progress; it ends early when the client disconnects.
#include <atomic>
#include <deque>
#include <utility>

#include "absl/strings/str_cat.h"
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

// Share of the time until the deadline that the store may use: the response must arrive before the
// deadline.
constexpr double kDeadlineShare = 0.95;

class BuildStream final : public grpc::ServerWriteReactor<v1::BuildProgress>,
                          public std::enable_shared_from_this<BuildStream> {
 public:
  // Decodes the request. It runs on the build's thread, so that its errors are reported like all
  // others.
  using SpecOf = std::function<absl::StatusOr<kvstore::BuildSpec>(const Call& call)>;

  BuildStream(kvstore::Store& store, Calls& calls, Log& log, absl::Duration max_idle,
              uint64_t sequence_id)
      : store_(store),
        calls_(calls),
        log_(log),
        max_idle_(max_idle),
        sequence_id_(sequence_id),
        alarm_(calls.alarms()) {}

  void Start(grpc::CallbackServerContext* context, SpecOf spec_of) {
    self_ = shared_from_this();
    absl::StatusOr<Call> call = calls_.Begin(context, Rpc::kBuildIndex, Access::kSession);
    if (!call.ok()) {
      Finish(ToGrpc(call.status()));
      return;
    }
    call_ = *std::move(call);
    const absl::Status taken =
        calls_.RunBuild([self = shared_from_this(), spec_of = std::move(spec_of)] {
          self->End(Guarded([&] { return self->Build(spec_of); }));
        });
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
  absl::Status Build(const SpecOf& spec_of) {
    absl::StatusOr<kvstore::BuildSpec> spec = spec_of(call_);
    if (!spec.ok()) return spec.status();
    if (absl::Status status = call_.Check(); !status.ok()) return status;
    const SteadyTime now = SteadyTime::Now();
    spec->is_cancelled = [this] { return cancelled_.load(std::memory_order_relaxed); };
    spec->deadline = now + (call_.deadline - now) * kDeadlineShare;
    const absl::Status status = store_.BuildIndex(
        call_.session.tenant, sequence_id_, *spec,
        [this](const kvstore::BuildProgress& progress) { return Report(progress); });
    log_.Info("index_build", {{"sequence_id", sequence_id_},
                              {"session", call_.session.id},
                              {"status", StatusName(status.code())},
                              {"seconds", absl::ToDoubleSeconds(SteadyTime::Now() - now)}});
    return status;
  }

  // Queues a progress message. Returns false when the build must stop: cancelled, or past its
  // deadline.
  bool Report(const kvstore::BuildProgress& progress) {
    if (cancelled_.load(std::memory_order_relaxed)) return false;
    if (SteadyTime::Now() >= call_.deadline) return false;
    absl::MutexLock lock(&mutex_);
    if (unsent_.size() < kMaxUnsentProgress) unsent_.emplace_back();
    ToWire(progress, &unsent_.back());
    WriteOrFinish();
    return true;
  }

  void End(const absl::Status& status) {
    absl::Status outcome = status;
    if (status.code() == absl::StatusCode::kCancelled && SteadyTime::Now() >= call_.deadline) {
      outcome = DeadlineExceeded("", "the deadline has passed");
    }
    calls_.End(call_, outcome);
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
      self->log_.Warning("progress_not_read", {{"sequence_id", self->sequence_id_},
                                               {"session", self->call_.session.id},
                                               {"unread", self->unsent_.size()}});
      self->call_.context->TryCancel();
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

  kvstore::Store& store_;
  Calls& calls_;
  Log& log_;
  const absl::Duration max_idle_;
  const uint64_t sequence_id_;
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
  const auto stream = std::make_shared<BuildStream>(store_, calls_, log_, config_.stream_timeout,
                                                    request->sequence_id());
  stream->Start(context, [this, request](const Call& call) -> absl::StatusOr<kvstore::BuildSpec> {
    absl::StatusOr<kvstore::BuildSpec> spec = BuildSpecOf(*request);
    if (!spec.ok()) return spec.status();
    const absl::StatusOr<kvstore::IndexDescriptor> index =
        IndexOrDefault(call, "sequence_id", request->sequence_id(), request->has_index(),
                       request->index(), "index");
    if (!index.ok()) return index.status();
    if (index->kind == kvstore::IndexKind::kFlat)
      return InvalidArgument("index.flat", "needs no build");
    spec->index = *index;
    return spec;
  });
  return stream.get();  // holds itself until OnDone
}

}  // namespace pqcached::service

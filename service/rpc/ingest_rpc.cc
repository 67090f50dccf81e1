// Ingest: a transaction over a stream.
#include <grpcpp/support/byte_buffer.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/base/status_macros.h"
#include "kvstore/clock.h"
#include "service/base/guarded.h"
#include "service/base/refusal.h"
#include "service/rpc/grpc_status.h"
#include "service/rpc/kv_cache_service.h"
#include "service/rpc/received_message.h"
#include "service/wire/ingest_message.h"

namespace pqcached::service {
namespace {

using kvstore::SteadyTime;

// IngestStream is one Ingest call. While a serving thread works on one message, the next one is
// already being read; it waits for its turn.
//
// The rows are committed when the client has ended its side in order. A failed read does not
// distinguish this from a client that has disconnected, of which gRPC may be notified later; but on
// a dead stream the initial metadata can no longer be sent. Therefore the initial metadata is sent
// after the last read, and only its success leads to the commit.
class IngestStream final : public grpc::ServerReadReactor<grpc::ByteBuffer>,
                           public std::enable_shared_from_this<IngestStream> {
 public:
  IngestStream(IngestRows rows, Calls& calls, absl::Duration max_idle, grpc::ByteBuffer* response)
      : calls_(calls),
        max_idle_(max_idle),
        response_(response),
        rows_(std::move(rows)),
        alarm_(calls.alarms()) {}

  void Start(grpc::CallbackServerContext* context, const Entrance& entrance) {
    self_ = shared_from_this();
    absl::StatusOr<Call> call = calls_.Begin(context, Rpc::kIngest, entrance);
    if (!call.ok()) {
      Finish(ToGrpc(call.status()));
      return;
    }
    call_ = *std::move(call);
    absl::MutexLock lock(&mutex_);
    waiting_since_ = SteadyTime::Now();
    SetAlarm();
    StartRead(&incoming_);
  }

  void OnReadDone(bool ok) override {
    {
      absl::MutexLock lock(&mutex_);
      read_ = ok ? Read::kMessage : Read::kEnd;
    }
    ProcessNext();
  }

  void OnSendInitialMetadataDone(bool ok) override {
    if (!ok) {
      absl::MutexLock lock(&mutex_);
      FinishLocked(Cancelled("the caller has cancelled the call"));
      return;
    }
    {
      absl::MutexLock lock(&mutex_);
      if (finished_) return;
      working_ = true;
    }
    Work([](IngestStream& self) { return self.Commit(); }, Lane::kBrief);
  }

  // Deletes this object, unless a timer holds it at this moment.
  void OnDone() override { self_.reset(); }

 private:
  using Step = absl::Status (*)(IngestStream&);
  enum class Read { kInProgress, kMessage, kEnd, kEndHandled };

  // Handles what has been read, unless a thread still works on the previous message.
  void ProcessNext() {
    {
      absl::MutexLock lock(&mutex_);
      if (finished_ || working_) return;
      if (read_ == Read::kEnd) {
        read_ = Read::kEndHandled;
        StartSendInitialMetadata();
      }
      if (read_ != Read::kMessage) return;
      working_ = true;
      taken_.Swap(&incoming_);
      read_ = Read::kInProgress;
      StartRead(&incoming_);
    }
    Work([](IngestStream& self) { return self.HandleMessage(); }, Lane::kBulk);
  }

  // Runs `step` on a serving thread. An error, or `done_` after it, finishes the call.
  void Work(Step step, Lane lane) {
    const auto carry_out = [self = shared_from_this(), step] {
      absl::Status status = self->call_.Check();
      if (status.ok()) status = Guarded([&] { return step(*self); });
      self->EndWork(status);
    };
    const absl::Status taken = calls_.RunServing(
        {.tenant = call_.session.tenant,
         .lane = lane,
         .run = carry_out,
         .deadline = call_.deadline,
         .expire = [self = shared_from_this()] { self->EndWork(Calls::WaitedTooLong()); }});
    if (!taken.ok()) EndWork(taken);
  }

  void EndWork(const absl::Status& status) {
    {
      absl::MutexLock lock(&mutex_);
      working_ = false;
      waiting_since_ = SteadyTime::Now();
      if (!status.ok() || done_) {
        FinishLocked(status);
      } else if (expired_) {
        FinishLocked(DeadlineExceeded("", "the deadline has passed"));
      }
    }
    ProcessNext();
  }

  absl::Status HandleMessage() {
    RETURN_IF_ERROR(message_.Parse(received_.Take(&taken_)));
    return rows_->Take(call_, message_);
  }

  absl::Status Commit() {
    v1::IngestResponse response;
    RETURN_IF_ERROR(rows_->Commit(call_, &response));
    bool own_buffer = false;
    const grpc::Status written =
        grpc::SerializationTraits<v1::IngestResponse>::Serialize(response, response_, &own_buffer);
    if (!written.ok()) return Internal(written.error_message());
    done_ = true;
    return absl::OkStatus();
  }

  void SetAlarm() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    const SteadyTime idle_since = working_ ? SteadyTime::Now() : waiting_since_;
    const SteadyTime next = std::min(call_.deadline, idle_since + max_idle_);
    alarm_.Set(next, [weak = weak_from_this()] {
      if (const auto self = weak.lock(); self != nullptr) self->CheckDeadlines();
    });
  }

  // Ends the call at its deadline, or when a client that sends nothing has held its rows and their
  // memory for stream_timeout.
  void CheckDeadlines() {
    absl::MutexLock lock(&mutex_);
    if (finished_) return;
    const SteadyTime now = SteadyTime::Now();
    if (now >= call_.deadline) {
      expired_ = true;
      if (!working_) FinishLocked(DeadlineExceeded("", "the deadline has passed"));
    } else if (!working_ && now >= waiting_since_ + max_idle_) {
      FinishLocked(DeadlineExceeded(
          "stream_timeout",
          absl::StrCat("no message received for ", absl::FormatDuration(max_idle_))));
    } else {
      SetAlarm();
    }
  }

  // The transaction is ended first, so that a caller that receives the failure can begin again at
  // once.
  void FinishLocked(const absl::Status& status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (finished_) return;
    finished_ = true;
    rows_.reset();
    alarm_.Cancel();
    calls_.gate().End(call_, status);
    Finish(ToGrpc(status));
  }

  Calls& calls_;
  const absl::Duration max_idle_;
  grpc::ByteBuffer* const response_;
  Call call_;
  grpc::ByteBuffer incoming_;           // owned by gRPC while a read is in progress
  std::shared_ptr<IngestStream> self_;  // until OnDone
  // Used by the thread that works on the call; the lock passes them to the next one.
  grpc::ByteBuffer taken_;
  ReceivedMessage received_;  // `message_` borrows from it
  IngestMessage message_;
  std::optional<IngestRows> rows_;  // until the call is finished
  bool done_ = false;
  absl::Mutex mutex_;
  Alarm alarm_ ABSL_GUARDED_BY(mutex_);
  Read read_ ABSL_GUARDED_BY(mutex_) = Read::kInProgress;
  SteadyTime waiting_since_ ABSL_GUARDED_BY(mutex_);  // time of the last work on a message
  bool working_ ABSL_GUARDED_BY(mutex_) = false;
  bool expired_ ABSL_GUARDED_BY(mutex_) = false;
  bool finished_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace

grpc::ServerReadReactor<grpc::ByteBuffer>* KvCacheService::Ingest(Context* context,
                                                                  grpc::ByteBuffer* response) {
  const auto stream = std::make_shared<IngestStream>(
      parts_.handlers.rows.BeginIngest(), parts_.calls, parts_.config.stream_timeout, response);
  stream->Start(context, parts_.entrance);
  return stream.get();  // holds itself until OnDone
}

}  // namespace pqcached::service

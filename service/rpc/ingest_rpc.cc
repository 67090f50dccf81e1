// RPCs that write KV rows: Ingest (a transaction over a stream) and Append.
#include <grpcpp/support/byte_buffer.h>

#include <algorithm>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "kvstore/clock.h"
#include "service/base/guarded.h"
#include "service/base/log.h"
#include "service/base/refusal.h"
#include "service/rpc/grpc_status.h"
#include "service/rpc/ingest_message.h"
#include "service/rpc/kv_cache_service.h"
#include "service/wire/staging_claims.h"
#include "service/wire/wire.h"

namespace pqcached::service {
namespace {

using kvstore::SteadyTime;

// Returns an error about names with its path in IngestHeader.
absl::Status PrefixHeader(const absl::Status& status) {
  return PrefixField("header", MoveField("first_position", "token_ids_begin", status));
}

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
  IngestStream(kvstore::Store& store, Calls& calls, const Config& config,
               grpc::ByteBuffer* response)
      : store_(store),
        calls_(calls),
        max_tensor_bytes_(config.max_message_bytes),
        max_idle_(config.stream_timeout),
        response_(response),
        alarm_(calls.alarms()) {}

  void Start(grpc::CallbackServerContext* context) {
    self_ = shared_from_this();
    absl::StatusOr<Call> call = calls_.Begin(context, Rpc::kIngest, Access::kSession);
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
    Work([](IngestStream& self) { return self.Commit(); }, Executor::Lane::kBrief);
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
      message_.Swap(&incoming_);
      read_ = Read::kInProgress;
      StartRead(&incoming_);
    }
    Work([](IngestStream& self) { return self.HandleMessage(); }, Executor::Lane::kBulk);
  }

  // Runs `step` on a serving thread. An error, or `done_` after it, finishes the call.
  void Work(Step step, Executor::Lane lane) {
    const auto carry_out = [self = shared_from_this(), step] {
      absl::Status status = self->call_.Check();
      if (status.ok()) status = Guarded([&] { return step(*self); });
      self->EndWork(status);
    };
    const absl::Status taken = calls_.RunServing(carry_out, lane);
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
    if (absl::Status status = request_.Parse(&message_); !status.ok()) return status;
    switch (request_.request().request_case()) {
      case v1::IngestRequest::kHeader:
        return HandleHeader(request_.request().header());
      case v1::IngestRequest::kChunk:
        return HandleChunk(request_.request().chunk());
      case v1::IngestRequest::REQUEST_NOT_SET:
        break;
    }
    return InvalidArgument("request", "missing: header or chunk");
  }

  absl::Status HandleHeader(const v1::IngestHeader& header) {
    if (transaction_ != nullptr) return InvalidArgument("header", "sent twice");
    auto transaction = store_.BeginIngest(call_.session.tenant, header.sequence_id());
    if (!transaction.ok()) return PrefixField("header", transaction.status());
    transaction_ = *std::move(transaction);
    sequence_id_ = header.sequence_id();
    first_id_ = header.token_ids_begin();
    token_ids_.assign(header.token_ids().begin(), header.token_ids().end());
    return absl::OkStatus();
  }

  absl::Status HandleChunk(const v1::IngestChunk& chunk) {
    if (transaction_ == nullptr) return InvalidArgument("header", "must come first");
    if (chunk.query_samples_size() > 0) return UnimplementedField("chunk.query_samples");
    if (!chunk.has_rows()) return InvalidArgument("chunk.rows", "missing");
    StagingClaims claims(store_, call_.session.id);  // released when the rows are copied
    const absl::StatusOr<kvstore::LayerRows> rows = request_.Rows(max_tensor_bytes_, &claims);
    if (!rows.ok()) return rows.status();
    return PrefixField("chunk", transaction_->Write(chunk.first_position(), *rows));
  }

  absl::Status Commit() {
    if (transaction_ == nullptr) return InvalidArgument("header", "missing");
    // Tokens are named after their rows are stored, so that a failed call has changed nothing.
    absl::Status named;
    if (!token_ids_.empty()) {
      named = store_.CheckNames(call_.session.tenant, sequence_id_, first_id_, token_ids_);
    }
    if (!named.ok()) return PrefixHeader(named);
    const absl::StatusOr<uint64_t> token_count = transaction_->Commit();
    if (!token_count.ok()) return token_count.status();
    if (!token_ids_.empty()) {
      named = store_.NameTokens(call_.session.tenant, sequence_id_, first_id_, token_ids_);
      if (!named.ok()) return PrefixHeader(named);
    }
    v1::IngestResponse response;
    response.set_token_count(*token_count);
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
    transaction_.reset();
    alarm_.Cancel();
    calls_.End(call_, status);
    Finish(ToGrpc(status));
  }

  kvstore::Store& store_;
  Calls& calls_;
  const uint64_t max_tensor_bytes_;
  const absl::Duration max_idle_;
  grpc::ByteBuffer* const response_;
  Call call_;
  grpc::ByteBuffer incoming_;           // owned by gRPC while a read is in progress
  std::shared_ptr<IngestStream> self_;  // until OnDone
  // Used by the thread that works on the call; the lock passes them to the next one.
  grpc::ByteBuffer message_;
  IngestMessage request_;
  std::unique_ptr<kvstore::IngestTransaction> transaction_;
  uint64_t sequence_id_ = 0;
  uint64_t first_id_ = 0;
  std::vector<uint32_t> token_ids_;  // ids of the tokens, recorded after the commit of the rows
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
  const auto stream = std::make_shared<IngestStream>(store_, calls_, config_, response);
  stream->Start(context);
  return stream.get();  // holds itself until OnDone
}

absl::StatusOr<uint64_t> KvCacheService::AppendOne(const Call& call, const v1::SequenceAppend& item,
                                                   const std::string& field,
                                                   const std::vector<kvstore::LayerRows>& layers) {
  const std::span<const uint32_t> token_ids(item.token_ids().data(),
                                            static_cast<size_t>(item.token_ids_size()));
  if (!token_ids.empty()) {
    const bool has_tokens = !layers.empty() && !layers.front().keys.shape.empty();
    const uint64_t tokens = has_tokens ? layers.front().keys.shape.front() : 0;
    if (token_ids.size() != tokens) {
      return InvalidArgument(
          field + ".token_ids",
          absl::StrCat(token_ids.size(), " of them, must be one per token: ", tokens));
    }
    const absl::Status named = store_.CheckNames(call.session.tenant, item.sequence_id(),
                                                 item.first_position(), token_ids);
    if (!named.ok()) return PrefixField(field, named);
  }
  absl::StatusOr<uint64_t> token_count =
      store_.Append(call.session.tenant, item.sequence_id(), item.first_position(), layers);
  if (!token_count.ok()) return PrefixField(field, token_count.status());
  if (token_ids.empty()) return token_count;
  // Tokens are named after their rows are stored, so that a failed call has changed nothing.
  const absl::Status named =
      store_.NameTokens(call.session.tenant, item.sequence_id(), item.first_position(), token_ids);
  if (!named.ok()) return PrefixField(field, named);
  return token_count;
}

KvCacheService::Reactor* KvCacheService::Append(Context* context, const v1::AppendRequest* request,
                                                v1::AppendResponse* response) {
  return calls_.Unary(
      context, Rpc::kAppend, Access::kSession, [=, this](const Call& call) -> absl::Status {
        if (absl::Status status = CheckCount("items", request->items_size(), kMaxBatchItems);
            !status.ok()) {
          return status;
        }
        absl::flat_hash_set<uint64_t> seen;
        StagingClaims claims(store_, call.session.id);
        std::vector<std::vector<kvstore::LayerRows>> items;
        for (int i = 0; i < request->items_size(); ++i) {
          const v1::SequenceAppend& item = request->items(i);
          const std::string field = absl::StrCat("items[", i, "]");
          if (!seen.insert(item.sequence_id()).second) {
            return InvalidArgument(field + ".sequence_id",
                                   absl::StrCat(item.sequence_id(), " is listed twice"));
          }
          if (absl::Status status = CheckLease(call, item.lease(), field + ".lease");
              !status.ok()) {
            return status;
          }
          std::vector<kvstore::LayerRows>& layers = items.emplace_back();
          for (int j = 0; j < item.rows_size(); ++j) {
            absl::StatusOr<kvstore::LayerRows> rows =
                LayerRowsOf(item.rows(j), absl::StrCat(field, ".rows[", j, "]"),
                            config_.max_message_bytes, &claims);
            if (!rows.ok()) return rows.status();
            layers.push_back(*std::move(rows));
          }
        }
        for (int i = 0; i < request->items_size(); ++i) {
          if (absl::Status status = call.Check(); !status.ok()) return status;
          const v1::SequenceAppend& item = request->items(i);
          const absl::StatusOr<uint64_t> token_count =
              AppendOne(call, item, absl::StrCat("items[", i, "]"), items[static_cast<size_t>(i)]);
          if (!token_count.ok()) return token_count.status();
          response->add_token_counts(*token_count);
          if (absl::Status status = FillAttachment(call, item.lease(), response->add_attachments());
              !status.ok()) {
            return status;
          }
        }
        return absl::OkStatus();
      });
}

}  // namespace pqcached::service

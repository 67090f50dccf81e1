// Rows in: Ingest (a transaction over a stream) and Append.
#include <grpcpp/alarm.h>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "service/kv_cache_service.h"
#include "service/log.h"
#include "service/staging_claims.h"
#include "service/wire.h"

namespace pqcached::service {
namespace {

// Puts the path of a chunk or an item before an error of the store about its rows.
absl::Status UnderRows(const std::string& field, const absl::Status& status) {
  if (status.code() == absl::StatusCode::kNotFound) return Under(field + ".sequence_id", status);
  const bool about_rows = absl::StartsWith(status.message(), "layer") ||
                          absl::StartsWith(status.message(), "keys") ||
                          absl::StartsWith(status.message(), "values");
  return Under(about_rows ? field + ".rows" : field, status);
}

// One Ingest call. At any time either a message is awaited, or one is being worked on by a serving
// thread.
//
// The rows are committed when the client has ended its side well. A failed read does not tell an
// end from a client that is gone, and the news of its going may come later; but on a dead stream
// the initial metadata cannot be sent any more. So they are sent after the last read, and only
// their success leads to the commit.
class IngestStream final : public grpc::ServerReadReactor<v1::IngestRequest>,
                           public std::enable_shared_from_this<IngestStream> {
 public:
  IngestStream(kvstore::Store& store, Calls& calls, uint64_t max_tensor_bytes,
               v1::IngestResponse* response)
      : store_(store), calls_(calls), max_tensor_bytes_(max_tensor_bytes), response_(response) {}

  void Start(grpc::CallbackServerContext* context) {
    self_ = shared_from_this();
    absl::StatusOr<Call> call = calls_.Begin(context, Rpc::kIngest, Access::kSession);
    if (!call.ok()) {
      Finish(ToGrpc(call.status()));
      return;
    }
    call_ = *std::move(call);
    absl::MutexLock lock(&mutex_);
    alarm_.Set(absl::ToChronoTime(call_.deadline), [weak = weak_from_this()](bool expired) {
      const auto self = weak.lock();
      if (expired && self != nullptr) self->Expire();
    });
    StartRead(&request_);
  }

  void OnReadDone(bool ok) override {
    if (!ok) {
      absl::MutexLock lock(&mutex_);
      if (!finished_) StartSendInitialMetadata();
      return;
    }
    Work([](IngestStream& self) { return self.HandleMessage(); });
  }

  void OnSendInitialMetadataDone(bool ok) override {
    if (!ok) {
      absl::MutexLock lock(&mutex_);
      FinishLocked(absl::CancelledError("the caller has gone"));
      return;
    }
    Work([](IngestStream& self) { return self.Commit(); });
  }

  // Deletes this, unless a timer is just looking.
  void OnDone() override { self_.reset(); }

 private:
  using Step = absl::Status (*)(IngestStream&);

  // Runs `step` on a serving thread. An error, or `done_` after it, finishes the call; else the
  // next message is awaited.
  void Work(Step step) {
    {
      absl::MutexLock lock(&mutex_);
      if (finished_) return;
      working_ = true;
    }
    const absl::Status taken = calls_.RunServing([self = shared_from_this(), step] {
      absl::Status status = self->call_.Check();
      if (status.ok()) status = Guarded([&] { return step(*self); });
      self->EndWork(status);
    });
    if (!taken.ok()) EndWork(taken);
  }

  void EndWork(const absl::Status& status) {
    absl::MutexLock lock(&mutex_);
    working_ = false;
    if (!status.ok() || done_) {
      FinishLocked(status);
    } else if (expired_) {
      FinishLocked(absl::DeadlineExceededError("the deadline has passed"));
    } else {
      StartRead(&request_);
    }
  }

  absl::Status HandleMessage() {
    switch (request_.request_case()) {
      case v1::IngestRequest::kHeader:
        return HandleHeader(request_.header());
      case v1::IngestRequest::kChunk:
        return HandleChunk(request_.chunk());
      case v1::IngestRequest::REQUEST_NOT_SET:
        break;
    }
    return Invalid("request", "missing: header or chunk");
  }

  absl::Status HandleHeader(const v1::IngestHeader& header) {
    if (transaction_ != nullptr) return Invalid("header", "sent twice");
    auto transaction = store_.BeginIngest(call_.session.tenant, header.sequence_id());
    if (!transaction.ok()) return Under("header.sequence_id", transaction.status());
    transaction_ = *std::move(transaction);
    sequence_id_ = header.sequence_id();
    first_id_ = header.token_ids_begin();
    token_ids_.assign(header.token_ids().begin(), header.token_ids().end());
    return absl::OkStatus();
  }

  absl::Status HandleChunk(const v1::IngestChunk& chunk) {
    if (transaction_ == nullptr) return Invalid("header", "must come first");
    if (chunk.query_samples_size() > 0) return Unimplemented("chunk.query_samples");
    if (!chunk.has_rows()) return Invalid("chunk.rows", "missing");
    const absl::StatusOr<kvstore::LayerRows> rows =
        LayerRowsOf(chunk.rows(), "chunk.rows", max_tensor_bytes_);
    if (!rows.ok()) return rows.status();
    const absl::Status status = transaction_->Write(chunk.first_position(), *rows);
    return Under(absl::StartsWith(status.message(), "first_position") ? "chunk" : "chunk.rows",
                 status);
  }

  absl::Status Commit() {
    if (transaction_ == nullptr) return Invalid("header", "missing");
    if (!token_ids_.empty()) {
      const absl::Status named =
          store_.NameTokens(call_.session.tenant, sequence_id_, first_id_, token_ids_);
      if (!named.ok()) return Under("header.token_ids", named);
    }
    const absl::StatusOr<uint64_t> token_count = transaction_->Commit();
    if (!token_count.ok()) return token_count.status();
    response_->set_token_count(*token_count);
    done_ = true;
    return absl::OkStatus();
  }

  void Expire() {
    absl::MutexLock lock(&mutex_);
    expired_ = true;
    if (!working_) FinishLocked(absl::DeadlineExceededError("the deadline has passed"));
  }

  // The transaction goes first, so that a caller that hears of the failure can begin again at once.
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
  v1::IngestResponse* const response_;
  Call call_;
  v1::IngestRequest request_;
  std::shared_ptr<IngestStream> self_;  // until OnDone
  grpc::Alarm alarm_;
  // Of whoever works; the lock hands it on.
  std::unique_ptr<kvstore::IngestTransaction> transaction_;
  uint64_t sequence_id_ = 0;
  uint64_t first_id_ = 0;
  std::vector<uint32_t> token_ids_;  // named when all rows are there
  bool done_ = false;
  absl::Mutex mutex_;
  bool working_ ABSL_GUARDED_BY(mutex_) = false;
  bool expired_ ABSL_GUARDED_BY(mutex_) = false;
  bool finished_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace

grpc::ServerReadReactor<v1::IngestRequest>* KvCacheService::Ingest(Context* context,
                                                                   v1::IngestResponse* response) {
  const auto stream =
      std::make_shared<IngestStream>(store_, calls_, config_.max_message_bytes, response);
  stream->Start(context);
  return stream.get();  // holds itself until OnDone
}

absl::StatusOr<uint64_t> KvCacheService::AppendOne(const Call& call, const v1::SequenceAppend& item,
                                                   const std::string& field,
                                                   const std::vector<kvstore::LayerRows>& layers) {
  if (item.token_ids_size() > 0) {
    const bool has_tokens = !layers.empty() && !layers.front().keys.shape.empty();
    const uint64_t tokens = has_tokens ? layers.front().keys.shape.front() : 0;
    if (static_cast<uint64_t>(item.token_ids_size()) != tokens) {
      return Invalid(
          field + ".token_ids",
          absl::StrCat(item.token_ids_size(), " of them, must be one per token: ", tokens));
    }
    const absl::Status named =
        store_.NameTokens(call.session.tenant, item.sequence_id(), item.first_position(),
                          {item.token_ids().data(), static_cast<size_t>(item.token_ids_size())});
    if (named.code() == absl::StatusCode::kNotFound) return Under(field + ".sequence_id", named);
    if (!named.ok()) return Under(field + ".token_ids", named);
  }
  const absl::StatusOr<uint64_t> token_count =
      store_.Append(call.session.tenant, item.sequence_id(), item.first_position(), layers);
  if (!token_count.ok()) return UnderRows(field, token_count.status());
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
            return Invalid(field + ".sequence_id",
                           absl::StrCat(item.sequence_id(), " comes twice"));
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

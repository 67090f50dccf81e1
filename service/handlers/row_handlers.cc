#include "service/handlers/row_handlers.h"

#include <span>
#include <utility>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "kernels/base/status_macros.h"
#include "service/base/refusal.h"
#include "service/wire/staging_claims.h"
#include "service/wire/wire.h"

namespace pqcached::service {
namespace {

constexpr int kMaxCommitRows = static_cast<int>(kvstore::kMaxLayers);

// Returns an error about names with its path in IngestHeader.
absl::Status PrefixHeader(const absl::Status& status) {
  return PrefixField("header", MoveField("first_position", "token_ids_begin", status));
}

absl::Status CheckDistinctLayers(const v1::CommitRequest& request) {
  absl::flat_hash_set<uint32_t> seen;
  for (int i = 0; i < request.rows_size(); ++i) {
    if (!seen.insert(request.rows(i).layer()).second) {
      return InvalidArgument(absl::StrCat("rows[", i, "].layer"),
                             absl::StrCat(request.rows(i).layer(), " is listed twice"));
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status RowHandlers::Commit(const Caller& caller, const v1::CommitRequest& request,
                                 v1::CommitResponse* response) {
  RETURN_IF_ERROR(CheckCount("rows", request.rows_size(), kMaxCommitRows));
  RETURN_IF_ERROR(CheckDistinctLayers(request));
  StagingClaims claims(store_, caller.session.id);
  std::vector<kvstore::LayerRows> layers;
  for (int i = 0; i < request.rows_size(); ++i) {
    ASSIGN_OR_RETURN(
        kvstore::LayerRows rows,
        LayerRowsOf(request.rows(i), absl::StrCat("rows[", i, "]"), max_message_bytes_, &claims));
    layers.push_back(std::move(rows));
  }
  ASSIGN_OR_RETURN(auto transaction,
                   store_.BeginIngest(caller.session.tenant, request.sequence_id()));
  for (size_t i = 0; i < layers.size(); ++i) {
    RETURN_IF_ERROR(caller.Check());
    if (absl::Status status = transaction->Write(request.first_position(), layers[i]);
        !status.ok()) {
      return MoveField("rows", absl::StrCat("rows[", i, "]"), status);
    }
  }
  RETURN_IF_ERROR(caller.Check());
  const absl::StatusOr<uint64_t> token_count = transaction->Commit();
  if (token_count.ok()) response->set_token_count(*token_count);
  return token_count.status();
}

absl::StatusOr<uint64_t> RowHandlers::AppendOne(const Caller& caller,
                                                const v1::SequenceAppend& item,
                                                const std::string& field,
                                                const std::vector<kvstore::LayerRows>& layers) {
  const std::string& tenant = caller.session.tenant;
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
    const absl::Status named =
        store_.CheckNames(tenant, item.sequence_id(), item.first_position(), token_ids);
    if (!named.ok()) return PrefixField(field, named);
  }
  absl::StatusOr<uint64_t> token_count =
      store_.Append(tenant, item.sequence_id(), item.first_position(), layers);
  if (!token_count.ok()) return PrefixField(field, token_count.status());
  if (token_ids.empty()) return token_count;
  // Tokens are named after their rows are stored, so that a failed call has changed nothing.
  const absl::Status named =
      store_.NameTokens(tenant, item.sequence_id(), item.first_position(), token_ids);
  if (!named.ok()) return PrefixField(field, named);
  return token_count;
}

absl::Status RowHandlers::Append(const Caller& caller, const v1::AppendRequest& request,
                                 v1::AppendResponse* response) {
  RETURN_IF_ERROR(CheckCount("items", request.items_size(), kMaxBatchItems));
  absl::flat_hash_set<uint64_t> seen;
  StagingClaims claims(store_, caller.session.id);
  std::vector<std::vector<kvstore::LayerRows>> items;
  for (int i = 0; i < request.items_size(); ++i) {
    const v1::SequenceAppend& item = request.items(i);
    const std::string field = absl::StrCat("items[", i, "]");
    if (!seen.insert(item.sequence_id()).second) {
      return InvalidArgument(field + ".sequence_id",
                             absl::StrCat(item.sequence_id(), " is listed twice"));
    }
    RETURN_IF_ERROR(leases_.Check(caller, item.lease(), field + ".lease"));
    std::vector<kvstore::LayerRows>& layers = items.emplace_back();
    for (int j = 0; j < item.rows_size(); ++j) {
      ASSIGN_OR_RETURN(kvstore::LayerRows rows,
                       LayerRowsOf(item.rows(j), absl::StrCat(field, ".rows[", j, "]"),
                                   max_message_bytes_, &claims));
      layers.push_back(std::move(rows));
    }
  }
  for (int i = 0; i < request.items_size(); ++i) {
    RETURN_IF_ERROR(caller.Check());
    const v1::SequenceAppend& item = request.items(i);
    ASSIGN_OR_RETURN(
        const uint64_t token_count,
        AppendOne(caller, item, absl::StrCat("items[", i, "]"), items[static_cast<size_t>(i)]));
    response->add_token_counts(token_count);
    leases_.Fill(caller, item.lease(), response->add_attachments());
  }
  return absl::OkStatus();
}

absl::Status IngestRows::Take(const Caller& caller, const IngestMessage& message) {
  switch (message.request().request_case()) {
    case v1::IngestRequest::kHeader:
      return TakeHeader(caller, message.request().header());
    case v1::IngestRequest::kChunk:
      return TakeChunk(caller, message);
    case v1::IngestRequest::REQUEST_NOT_SET:
      break;
  }
  return InvalidArgument("request", "missing: header or chunk");
}

absl::Status IngestRows::TakeHeader(const Caller& caller, const v1::IngestHeader& header) {
  if (transaction_ != nullptr) return InvalidArgument("header", "sent twice");
  auto transaction = store_.BeginIngest(caller.session.tenant, header.sequence_id());
  if (!transaction.ok()) return PrefixField("header", transaction.status());
  transaction_ = *std::move(transaction);
  sequence_id_ = header.sequence_id();
  first_id_ = header.token_ids_begin();
  token_ids_.assign(header.token_ids().begin(), header.token_ids().end());
  return absl::OkStatus();
}

absl::Status IngestRows::TakeChunk(const Caller& caller, const IngestMessage& message) {
  const v1::IngestChunk& chunk = message.request().chunk();
  if (transaction_ == nullptr) return InvalidArgument("header", "must come first");
  if (chunk.query_samples_size() > 0) return UnimplementedField("chunk.query_samples");
  if (!chunk.has_rows()) return InvalidArgument("chunk.rows", "missing");
  StagingClaims claims(store_, caller.session.id);  // released when the rows are copied
  ASSIGN_OR_RETURN(const kvstore::LayerRows rows, message.Rows(max_message_bytes_, &claims));
  return PrefixField("chunk", transaction_->Write(chunk.first_position(), rows));
}

absl::Status IngestRows::Commit(const Caller& caller, v1::IngestResponse* response) {
  if (transaction_ == nullptr) return InvalidArgument("header", "missing");
  const std::string& tenant = caller.session.tenant;
  // Tokens are named after their rows are stored, so that a failed call has changed nothing.
  absl::Status named;
  if (!token_ids_.empty()) named = store_.CheckNames(tenant, sequence_id_, first_id_, token_ids_);
  if (!named.ok()) return PrefixHeader(named);
  ASSIGN_OR_RETURN(const uint64_t token_count, transaction_->Commit());
  if (!token_ids_.empty()) {
    named = store_.NameTokens(tenant, sequence_id_, first_id_, token_ids_);
    if (!named.ok()) return PrefixHeader(named);
  }
  response->set_token_count(token_count);
  return absl::OkStatus();
}

}  // namespace pqcached::service

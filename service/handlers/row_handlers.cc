#include "service/handlers/row_handlers.h"

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

// Names of an item: `names`, or one id per token.
struct ItemNames {
  ReceivedNames received;
  std::string field;  // path of the message that has them
};

absl::StatusOr<ItemNames> ItemNamesOf(const v1::SequenceAppend& item, const std::string& field,
                                      const std::vector<kvstore::LayerRows>& layers) {
  if (item.has_names()) {
    if (item.token_ids_size() > 0) {
      return InvalidArgument(field + ".token_ids", "names are given, too");
    }
    const std::string names_field = field + ".names";
    auto names = ReceivedNames::Of(item.names());
    if (!names.ok()) return PrefixField(names_field, names.status());
    return ItemNames{*std::move(names), names_field};
  }
  if (item.token_ids_size() == 0) return ItemNames{{}, field};
  const bool has_tokens = !layers.empty() && !layers.front().keys.shape.empty();
  const uint64_t tokens = has_tokens ? layers.front().keys.shape.front() : 0;
  const auto count = static_cast<uint64_t>(item.token_ids_size());
  if (count != tokens) {
    return InvalidArgument(field + ".token_ids",
                           absl::StrCat(count, " of them, must be one per token: ", tokens));
  }
  return ItemNames{
      {item.first_position(), "first_position", {item.token_ids().begin(), item.token_ids().end()}},
      field};
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
  auto names = ReceivedNames::Of(request.names());
  if (!names.ok()) return PrefixField("names", names.status());
  const NamedSequence named{store_, caller.session.tenant, request.sequence_id()};
  ASSIGN_OR_RETURN(auto transaction,
                   store_.BeginIngest(caller.session.tenant, request.sequence_id()));
  if (absl::Status status = names->Check(named); !status.ok()) {
    return PrefixField("names", status);
  }
  for (size_t i = 0; i < layers.size(); ++i) {
    RETURN_IF_ERROR(caller.Check());
    if (absl::Status status = transaction->Write(request.first_position(), layers[i]);
        !status.ok()) {
      return MoveField("rows", absl::StrCat("rows[", i, "]"), status);
    }
  }
  RETURN_IF_ERROR(caller.Check());
  ASSIGN_OR_RETURN(const uint64_t token_count, transaction->Commit());
  response->set_token_count(token_count);
  return PrefixField("names", names->Name(named));
}

absl::StatusOr<uint64_t> RowHandlers::AppendOne(const Caller& caller,
                                                const v1::SequenceAppend& item,
                                                const std::string& field,
                                                const std::vector<kvstore::LayerRows>& layers) {
  const std::string& tenant = caller.session.tenant;
  ASSIGN_OR_RETURN(const ItemNames names, ItemNamesOf(item, field, layers));
  const NamedSequence named{store_, tenant, item.sequence_id()};
  if (absl::Status status = names.received.Check(named); !status.ok()) {
    return PrefixField(names.field, status);
  }
  absl::StatusOr<uint64_t> token_count =
      store_.Append(tenant, item.sequence_id(), item.first_position(), layers);
  if (!token_count.ok()) return PrefixField(field, token_count.status());
  // Tokens are named after their rows are stored, so that a failed call has changed nothing.
  if (absl::Status status = names.received.Name(named); !status.ok()) {
    return PrefixField(names.field, status);
  }
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
  if (!header.has_names()) {
    names_ = ReceivedNames(header.token_ids_begin(), "token_ids_begin",
                           {header.token_ids().begin(), header.token_ids().end()});
    return absl::OkStatus();
  }
  if (header.token_ids_size() > 0) {
    return InvalidArgument("header.token_ids", "names are given, too");
  }
  names_field_ = "header.names";
  auto names = ReceivedNames::Of(header.names());
  if (!names.ok()) return PrefixField(names_field_, names.status());
  names_ = *std::move(names);
  return absl::OkStatus();
}

absl::Status IngestRows::TakeChunk(const Caller& caller, const IngestMessage& message) {
  const v1::IngestChunk& chunk = message.request().chunk();
  if (transaction_ == nullptr) return InvalidArgument("header", "must come first");
  RETURN_IF_ERROR(TakeSamples(caller, chunk));
  if (!chunk.has_rows() && chunk.query_samples_size() > 0) return absl::OkStatus();
  if (!chunk.has_rows()) return InvalidArgument("chunk.rows", "missing");
  StagingClaims claims(store_, caller.session.id);  // released when the rows are copied
  ASSIGN_OR_RETURN(const kvstore::LayerRows rows, message.Rows(max_message_bytes_, &claims));
  return PrefixField("chunk", transaction_->Write(chunk.first_position(), rows));
}

absl::Status IngestRows::TakeSamples(const Caller& caller, const v1::IngestChunk& chunk) {
  // Each layer once: its samples are merged with those that it has, which may be many bytes.
  absl::flat_hash_set<uint32_t> seen;
  for (int i = 0; i < chunk.query_samples_size(); ++i) {
    RETURN_IF_ERROR(caller.Check());
    const std::string field = absl::StrCat("chunk.query_samples[", i, "]");
    if (!seen.insert(chunk.query_samples(i).layer()).second) {
      return InvalidArgument(field + ".layer",
                             absl::StrCat(chunk.query_samples(i).layer(), " is listed twice"));
    }
    ASSIGN_OR_RETURN(const kvstore::LayerSamples samples,
                     LayerSamplesOf(chunk.query_samples(i), field, max_message_bytes_));
    if (absl::Status status = transaction_->AddSamples(samples); !status.ok()) {
      return PrefixField(field, status);
    }
  }
  return absl::OkStatus();
}

absl::Status IngestRows::Commit(const Caller& caller, v1::IngestResponse* response) {
  if (transaction_ == nullptr) return InvalidArgument("header", "missing");
  const NamedSequence named{store_, caller.session.tenant, sequence_id_};
  // Tokens are named after their rows are stored, so that a failed call has changed nothing.
  if (absl::Status status = names_.Check(named); !status.ok()) {
    return PrefixField(names_field_, status);
  }
  ASSIGN_OR_RETURN(const uint64_t token_count, transaction_->Commit());
  if (absl::Status status = names_.Name(named); !status.ok()) {
    return PrefixField(names_field_, status);
  }
  response->set_token_count(token_count);
  return absl::OkStatus();
}

}  // namespace pqcached::service

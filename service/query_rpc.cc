// Rank, fetch, attend.
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "service/kv_cache_service.h"
#include "service/wire.h"

namespace pqcached::service {
namespace {

constexpr size_t kMaxRememberedIndexes = 65536;

std::string Item(int index) { return absl::StrCat("items[", index, "]"); }

// Puts the path of an item before an error of the store, which speaks of a query, a selection, a
// sequence or tokens.
absl::Status UnderItem(const std::string& field, const absl::Status& status) {
  if (status.code() == absl::StatusCode::kNotFound)
    return Under(field + ".query.sequence_id", status);
  for (const absl::string_view word : {"layer", "queries", "query_position"}) {
    if (absl::StartsWith(status.message(), word)) return Under(field + ".query", status);
  }
  for (const absl::string_view word : {"budget", "excluded", "sink_tokens", "window_tokens"}) {
    if (absl::StartsWith(status.message(), word)) return Under(field + ".selection", status);
  }
  return Under(field, status);
}

uint32_t QueryHeadsOf(const kvstore::Query& query) {
  return query.queries.shape.size() == 3 ? static_cast<uint32_t>(query.queries.shape[1]) : 0;
}

}  // namespace

absl::StatusOr<kvstore::IndexDescriptor> KvCacheService::DefaultIndex(const Call& call,
                                                                      uint64_t sequence_id) {
  {
    absl::MutexLock lock(&mutex_);
    const auto found = default_indexes_.find(sequence_id);
    // That the sequence is the tenant's own is checked by the store, whatever the index.
    if (found != default_indexes_.end()) return found->second;
  }
  const absl::StatusOr<kvstore::SequenceInfo> sequence =
      store_.DescribeSequence(call.session.tenant, sequence_id);
  if (!sequence.ok()) return sequence.status();
  for (const kvstore::CacheInfo& cache : store_.ListCaches(call.session.tenant)) {
    if (cache.cache_id != sequence->cache_id) continue;
    absl::MutexLock lock(&mutex_);
    if (default_indexes_.size() >= kMaxRememberedIndexes) default_indexes_.clear();
    default_indexes_[sequence_id] = cache.spec.default_index;
    return cache.spec.default_index;
  }
  return absl::NotFoundError(absl::StrCat("sequence_id: ", sequence_id));
}

absl::StatusOr<kvstore::IndexDescriptor> KvCacheService::IndexOrDefault(const Call& call,
                                                                        uint64_t sequence_id,
                                                                        bool present,
                                                                        const v1::IndexSpec& spec,
                                                                        const std::string& field) {
  const absl::StatusOr<std::optional<kvstore::IndexDescriptor>> index =
      IndexOf(present, spec, field);
  if (!index.ok()) return index.status();
  if (index->has_value()) return **index;
  const absl::StatusOr<kvstore::IndexDescriptor> fallback = DefaultIndex(call, sequence_id);
  if (!fallback.ok()) return NamingId("sequence_id", fallback.status());
  return fallback;
}

absl::StatusOr<kvstore::Selection> KvCacheService::ResolveSelection(const Call& call,
                                                                    uint64_t sequence_id,
                                                                    const v1::Selection& selection,
                                                                    const std::string& field) {
  absl::StatusOr<kvstore::Selection> result = SelectionOf(selection, field);
  if (!result.ok()) return result.status();
  const absl::StatusOr<kvstore::IndexDescriptor> index =
      IndexOrDefault(call, sequence_id, selection.has_index(), selection.index(), field + ".index");
  if (!index.ok()) return index.status();
  result->index = *index;
  return result;
}

absl::Status KvCacheService::CheckResponseBytes(uint64_t bytes) const {
  if (bytes <= config_.max_message_bytes) return absl::OkStatus();
  return absl::ResourceExhaustedError(absl::StrCat(
      "response: ", bytes, " bytes, above max_message_bytes = ", config_.max_message_bytes,
      "; ask for less at once"));
}

KvCacheService::Reactor* KvCacheService::TopK(Context* context, const v1::TopKRequest* request,
                                              v1::TopKResponse* response) {
  return calls_.Unary(
      context, Rpc::kTopK, Access::kSession, [=, this](const Call& call) -> absl::Status {
        if (absl::Status status = CheckCount("items", request->items_size(), kMaxBatchItems);
            !status.ok()) {
          return status;
        }
        for (int i = 0; i < request->items_size(); ++i) {
          if (absl::Status status = call.Check(); !status.ok()) return status;
          const v1::TopKItem& item = request->items(i);
          const absl::StatusOr<kvstore::Query> query = QueryOf(item.query(), Item(i) + ".query");
          if (!query.ok()) return query.status();
          const uint64_t sequence_id = item.query().sequence_id();
          const absl::StatusOr<kvstore::Selection> selection =
              ResolveSelection(call, sequence_id, item.selection(), Item(i) + ".selection");
          if (!selection.ok()) return selection.status();
          const absl::StatusOr<kvstore::Selected> selected =
              store_.TopK(call.session.tenant, sequence_id, *query, *selection);
          if (!selected.ok()) return UnderItem(Item(i), selected.status());
          ToWire(*selected, response->add_items());
          if (absl::Status status = CheckResponseBytes(response->ByteSizeLong()); !status.ok())
            return status;
        }
        return absl::OkStatus();
      });
}

KvCacheService::Reactor* KvCacheService::Score(Context* context, const v1::ScoreRequest* request,
                                               v1::ScoreResponse* response) {
  return calls_.Unary(
      context, Rpc::kScore, Access::kSession, [=, this](const Call& call) -> absl::Status {
        if (absl::Status status = CheckCount("items", request->items_size(), kMaxBatchItems);
            !status.ok()) {
          return status;
        }
        uint64_t bytes = 0;
        for (int i = 0; i < request->items_size(); ++i) {
          if (absl::Status status = call.Check(); !status.ok()) return status;
          const v1::ScoreItem& item = request->items(i);
          const absl::StatusOr<kvstore::Query> query = QueryOf(item.query(), Item(i) + ".query");
          if (!query.ok()) return query.status();
          const absl::StatusOr<kvstore::TokenRange> tokens =
              TokenRangeOf(item.has_tokens(), item.tokens(), Item(i) + ".tokens");
          if (!tokens.ok()) return tokens.status();
          const uint64_t sequence_id = item.query().sequence_id();
          const absl::StatusOr<kvstore::IndexDescriptor> index =
              IndexOrDefault(call, sequence_id, item.has_index(), item.index(), Item(i) + ".index");
          if (!index.ok()) return index.status();
          bytes += (tokens->end - tokens->begin) * QueryHeadsOf(*query) * sizeof(float);
          if (absl::Status status = CheckResponseBytes(bytes); !status.ok()) return status;
          const absl::StatusOr<kvstore::Scores> scores =
              store_.Score(call.session.tenant, sequence_id, *query, *index, *tokens);
          if (!scores.ok()) return UnderItem(Item(i), scores.status());
          ToWire(*scores, response->add_items());
        }
        return CheckResponseBytes(response->ByteSizeLong());
      });
}

// Bytes that one token takes in a response, over all kv heads: fetched once to be known before the
// rest is.
absl::StatusOr<size_t> KvCacheService::TokenBytes(const Call& call,
                                                  const kvstore::TokenRange& probe,
                                                  uint64_t sequence_id, uint32_t layer,
                                                  kvstore::RowPart part) {
  const absl::StatusOr<kvstore::Rows> rows = store_.FetchRange(
      call.session.tenant, sequence_id, layer, {probe.begin, probe.begin + 1}, part);
  if (!rows.ok()) return NamingId("sequence_id", rows.status());
  return rows->data.size();
}

KvCacheService::Reactor* KvCacheService::FetchBlocks(Context* context,
                                                     const v1::FetchBlocksRequest* request,
                                                     v1::FetchBlocksResponse* response) {
  return calls_.Unary(
      context, Rpc::kFetchBlocks, Access::kSession, [=, this](const Call& call) -> absl::Status {
        if (absl::Status status = CheckCount("ranges", request->ranges_size(), kMaxFetchRanges);
            !status.ok()) {
          return status;
        }
        const absl::StatusOr<kvstore::RowPart> part = RowPartOf(request->part(), "part");
        if (!part.ok()) return part.status();
        uint64_t token_count = 0;
        std::vector<kvstore::TokenRange> ranges;
        for (int i = 0; i < request->ranges_size(); ++i) {
          const absl::StatusOr<kvstore::TokenRange> range =
              TokenRangeOf(true, request->ranges(i), absl::StrCat("ranges[", i, "]"));
          if (!range.ok()) return range.status();
          token_count += range->end - range->begin;
          ranges.push_back(*range);
        }
        const absl::StatusOr<size_t> token_bytes =
            TokenBytes(call, ranges.front(), request->sequence_id(), request->layer(), *part);
        if (!token_bytes.ok()) return NamingId("sequence_id", token_bytes.status());
        if (absl::Status status = CheckResponseBytes(token_count * *token_bytes); !status.ok())
          return status;
        for (size_t i = 0; i < ranges.size(); ++i) {
          if (absl::Status status = call.Check(); !status.ok()) return status;
          absl::StatusOr<kvstore::Rows> rows = store_.FetchRange(
              call.session.tenant, request->sequence_id(), request->layer(), ranges[i], *part);
          if (!rows.ok()) return Under(absl::StrCat("ranges[", i, "]"), rows.status());
          ToWire(*std::move(rows), response->add_blocks());
        }
        return CheckResponseBytes(response->ByteSizeLong());
      });
}

KvCacheService::Reactor* KvCacheService::FetchTokens(Context* context,
                                                     const v1::FetchTokensRequest* request,
                                                     v1::FetchTokensResponse* response) {
  return calls_.Unary(
      context, Rpc::kFetchTokens, Access::kSession, [=, this](const Call& call) -> absl::Status {
        const absl::StatusOr<kvstore::RowPart> part = RowPartOf(request->part(), "part");
        if (!part.ok()) return part.status();
        if (request->count() == 0) return Invalid("count", "0, must be at least 1");
        if (request->positions().empty()) return Invalid("positions", "missing");
        const absl::StatusOr<size_t> token_bytes = TokenBytes(
            call, {request->positions(0), 0}, request->sequence_id(), request->layer(), *part);
        if (!token_bytes.ok()) return NamingId("sequence_id", token_bytes.status());
        if (absl::Status status = CheckResponseBytes(uint64_t{request->count()} * *token_bytes);
            !status.ok()) {
          return status;
        }
        absl::StatusOr<kvstore::Rows> rows = store_.FetchTokens(
            call.session.tenant, request->sequence_id(), request->layer(),
            {request->positions().data(), static_cast<size_t>(request->positions_size())}, *part);
        if (!rows.ok()) return NamingId("sequence_id", rows.status());
        if (rows->tokens != request->count()) {
          return Invalid("positions", absl::StrCat(request->positions_size(),
                                                   " of them, must be kv_heads x count = ",
                                                   uint64_t{rows->kv_heads} * request->count()));
        }
        ToWire(*std::move(rows), response->mutable_rows());
        return CheckResponseBytes(response->ByteSizeLong());
      });
}

absl::Status KvCacheService::AttendOne(const Call& call, const v1::AttendItem& item,
                                       const std::string& field, v1::Attention* message) {
  const absl::StatusOr<kvstore::Query> query = QueryOf(item.query(), field + ".query");
  if (!query.ok()) return query.status();
  const uint64_t sequence_id = item.query().sequence_id();
  absl::StatusOr<kvstore::Attention> attention;
  if (item.tokens_case() == v1::AttendItem::kSelection) {
    const absl::StatusOr<kvstore::Selection> selection =
        ResolveSelection(call, sequence_id, item.selection(), field + ".selection");
    if (!selection.ok()) return selection.status();
    attention =
        store_.Attend(call.session.tenant, sequence_id, *query, *selection, item.want_positions());
  } else if (item.tokens_case() == v1::AttendItem::kPositions) {
    const absl::StatusOr<std::vector<uint32_t>> positions =
        PositionsOf(item.positions().count(), item.positions().positions(), field + ".positions");
    if (!positions.ok()) return positions.status();
    attention = store_.AttendPositions(call.session.tenant, sequence_id, *query, *positions);
    if (attention.ok() && attention->selected.count != item.positions().count()) {
      return Invalid(
          field + ".positions.positions",
          absl::StrCat(positions->size(), " of them, must be kv_heads x count = ",
                       uint64_t{attention->selected.kv_heads} * item.positions().count()));
    }
  } else {
    return Invalid(field + ".tokens", "missing: selection or positions");
  }
  if (!attention.ok()) return UnderItem(field, attention.status());
  ToWire(*attention, QueryHeadsOf(*query), item.want_positions(), message);
  return absl::OkStatus();
}

KvCacheService::Reactor* KvCacheService::Attend(Context* context, const v1::AttendRequest* request,
                                                v1::AttendResponse* response) {
  return calls_.Unary(
      context, Rpc::kAttend, Access::kSession, [=, this](const Call& call) -> absl::Status {
        if (absl::Status status = CheckCount("items", request->items_size(), kMaxBatchItems);
            !status.ok()) {
          return status;
        }
        for (int i = 0; i < request->items_size(); ++i) {
          if (absl::Status status = call.Check(); !status.ok()) return status;
          if (absl::Status status =
                  AttendOne(call, request->items(i), Item(i), response->add_items());
              !status.ok()) {
            return status;
          }
          if (absl::Status status = CheckResponseBytes(response->ByteSizeLong()); !status.ok())
            return status;
        }
        return absl::OkStatus();
      });
}

}  // namespace pqcached::service

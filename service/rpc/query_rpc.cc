// RPCs that read: TopK, Score, FetchBlocks, FetchTokens, Attend.
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "service/base/refusal.h"
#include "service/rpc/kv_cache_service.h"
#include "service/wire/wire.h"

namespace pqcached::service {
namespace {

constexpr size_t kMaxRememberedSpecs = 8192;

std::string Item(int index) { return absl::StrCat("items[", index, "]"); }

// Returns an error of the store with its path in the request. The fields of the store are those of
// the item, but for the sequence, which the item's query names.
absl::Status PrefixItem(const std::string& field, const absl::Status& status) {
  return PrefixField(field, MoveField("sequence_id", "query.sequence_id", status));
}

uint32_t QueryHeadsOf(const kvstore::Query& query) {
  return query.queries.shape.size() == 3 ? static_cast<uint32_t>(query.queries.shape[1]) : 0;
}

}  // namespace

absl::StatusOr<KvCacheService::SharedSpec> KvCacheService::SpecOf(const Call& call,
                                                                  uint64_t sequence_id) {
  const std::string& tenant = call.session.tenant;
  {
    absl::MutexLock lock(&mutex_);
    const auto found = specs_.find(sequence_id);
    if (found != specs_.end() && found->second.tenant == tenant) return found->second.spec;
  }
  const absl::StatusOr<kvstore::SequenceInfo> sequence =
      store_.DescribeSequence(tenant, sequence_id);
  if (!sequence.ok()) return sequence.status();
  for (const kvstore::CacheInfo& cache : store_.ListCaches(tenant)) {
    if (cache.cache_id != sequence->cache_id) continue;
    const auto spec = std::make_shared<const kvstore::CacheSpec>(cache.spec);
    absl::MutexLock lock(&mutex_);
    if (specs_.size() >= kMaxRememberedSpecs) specs_.clear();
    specs_[sequence_id] = {tenant, spec};
    return spec;
  }
  return NotFound("sequence_id", absl::StrCat("no sequence ", sequence_id));
}

absl::StatusOr<kvstore::IndexDescriptor> KvCacheService::IndexOrDefault(
    const Call& call, absl::string_view id_field, uint64_t sequence_id, bool present,
    const v1::IndexSpec& spec, const std::string& field) {
  const absl::StatusOr<std::optional<kvstore::IndexDescriptor>> index =
      IndexOf(present, spec, field);
  if (!index.ok()) return index.status();
  if (index->has_value()) return **index;
  const absl::StatusOr<SharedSpec> cache = SpecOf(call, sequence_id);
  if (!cache.ok()) return MoveField("sequence_id", id_field, cache.status());
  return (*cache)->default_index;
}

absl::StatusOr<kvstore::Selection> KvCacheService::ResolveSelection(const Call& call,
                                                                    uint64_t sequence_id,
                                                                    const v1::Selection& selection,
                                                                    const std::string& item) {
  const std::string field = item + ".selection";
  absl::StatusOr<kvstore::Selection> result = SelectionOf(selection, field);
  if (!result.ok()) return result.status();
  const absl::StatusOr<kvstore::IndexDescriptor> index =
      IndexOrDefault(call, item + ".query.sequence_id", sequence_id, selection.has_index(),
                     selection.index(), field + ".index");
  if (!index.ok()) return index.status();
  result->index = *index;
  return result;
}

absl::Status KvCacheService::CheckResponseBytes(uint64_t bytes) const {
  if (bytes <= config_.max_message_bytes) return absl::OkStatus();
  return ResourceExhausted("response",
                           absl::StrCat(bytes, " bytes, above max_message_bytes = ",
                                        config_.max_message_bytes, "; request less per call"),
                           kNoRetry);
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
          const absl::StatusOr<kvstore::Query> query =
              QueryOf(item.query(), Item(i) + ".query", config_.max_message_bytes);
          if (!query.ok()) return query.status();
          const uint64_t sequence_id = item.query().sequence_id();
          const absl::StatusOr<kvstore::Selection> selection =
              ResolveSelection(call, sequence_id, item.selection(), Item(i));
          if (!selection.ok()) return selection.status();
          const absl::StatusOr<kvstore::Selected> selected =
              store_.TopK(call.session.tenant, sequence_id, *query, *selection);
          if (!selected.ok()) return PrefixItem(Item(i), selected.status());
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
          const absl::StatusOr<kvstore::Query> query =
              QueryOf(item.query(), Item(i) + ".query", config_.max_message_bytes);
          if (!query.ok()) return query.status();
          const absl::StatusOr<kvstore::TokenRange> tokens =
              TokenRangeOf(item.has_tokens(), item.tokens(), Item(i) + ".tokens");
          if (!tokens.ok()) return tokens.status();
          const uint64_t sequence_id = item.query().sequence_id();
          const absl::StatusOr<kvstore::IndexDescriptor> index =
              IndexOrDefault(call, Item(i) + ".query.sequence_id", sequence_id, item.has_index(),
                             item.index(), Item(i) + ".index");
          if (!index.ok()) return index.status();
          bytes += (tokens->end - tokens->begin) * QueryHeadsOf(*query) * sizeof(float);
          if (absl::Status status = CheckResponseBytes(bytes); !status.ok()) return status;
          const absl::StatusOr<kvstore::Scores> scores =
              store_.Score(call.session.tenant, sequence_id, *query, *index, *tokens);
          if (!scores.ok()) return PrefixItem(Item(i), scores.status());
          ToWire(*scores, response->add_items());
        }
        return CheckResponseBytes(response->ByteSizeLong());
      });
}

absl::StatusOr<KvCacheService::TokenShape> KvCacheService::TokenShapeOf(const Call& call,
                                                                        uint64_t sequence_id,
                                                                        uint32_t layer,
                                                                        kvstore::RowPart part) {
  const absl::StatusOr<SharedSpec> spec = SpecOf(call, sequence_id);
  if (!spec.ok()) return spec.status();
  for (const kvstore::LayerGroup& group : (*spec)->groups) {
    if (group.kind == kvstore::LayerKind::kNone) continue;
    if (std::find(group.layers.begin(), group.layers.end(), layer) == group.layers.end()) continue;
    const uint64_t keys = part == kvstore::RowPart::kValue ? 0 : group.key_dim;
    const uint64_t values = part == kvstore::RowPart::kKey ? 0 : group.value_dim;
    return TokenShape{group.kv_heads,
                      group.kv_heads * (keys + values) * kernels::DTypeBytes(group.dtype)};
  }
  return InvalidArgument("layer", absl::StrCat(layer, " is not stored by the cache"));
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
        const absl::StatusOr<TokenShape> token =
            TokenShapeOf(call, request->sequence_id(), request->layer(), *part);
        if (!token.ok()) return token.status();
        if (absl::Status status = CheckResponseBytes(token_count * token->bytes); !status.ok())
          return status;
        for (size_t i = 0; i < ranges.size(); ++i) {
          if (absl::Status status = call.Check(); !status.ok()) return status;
          absl::StatusOr<kvstore::Rows> rows = store_.FetchBlocks(
              call.session.tenant, request->sequence_id(), request->layer(), ranges[i], *part);
          if (!rows.ok()) {
            return MoveField("tokens", absl::StrCat("ranges[", i, "]"), rows.status());
          }
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
        if (request->count() == 0) return InvalidArgument("count", "0, must be at least 1");
        if (request->positions().empty()) return InvalidArgument("positions", "missing");
        const absl::StatusOr<TokenShape> token =
            TokenShapeOf(call, request->sequence_id(), request->layer(), *part);
        if (!token.ok()) return token.status();
        const uint64_t wanted = uint64_t{token->kv_heads} * request->count();
        if (static_cast<uint64_t>(request->positions_size()) != wanted) {
          return InvalidArgument("positions",
                                 absl::StrCat(request->positions_size(),
                                              " of them, must be kv_heads x count = ", wanted));
        }
        if (absl::Status status = CheckResponseBytes(uint64_t{request->count()} * token->bytes);
            !status.ok()) {
          return status;
        }
        absl::StatusOr<kvstore::Rows> rows = store_.FetchTokens(
            call.session.tenant, request->sequence_id(), request->layer(),
            {request->positions().data(), static_cast<size_t>(request->positions_size())}, *part);
        if (!rows.ok()) return rows.status();
        ToWire(*std::move(rows), response->mutable_rows());
        return CheckResponseBytes(response->ByteSizeLong());
      });
}

absl::Status KvCacheService::AttendOne(const Call& call, const v1::AttendItem& item,
                                       const std::string& field, v1::Attention* message) {
  const absl::StatusOr<kvstore::Query> query =
      QueryOf(item.query(), field + ".query", config_.max_message_bytes);
  if (!query.ok()) return query.status();
  const uint64_t sequence_id = item.query().sequence_id();
  absl::StatusOr<kvstore::Attention> attention;
  if (item.tokens_case() == v1::AttendItem::kSelection) {
    const absl::StatusOr<kvstore::Selection> selection =
        ResolveSelection(call, sequence_id, item.selection(), field);
    if (!selection.ok()) return selection.status();
    attention =
        store_.Attend(call.session.tenant, sequence_id, *query, *selection, item.want_positions());
  } else if (item.tokens_case() == v1::AttendItem::kPositions) {
    const absl::StatusOr<std::vector<uint32_t>> positions =
        PositionsOf(item.positions().count(), item.positions().positions(), field + ".positions");
    if (!positions.ok()) return positions.status();
    attention = store_.AttendPositions(call.session.tenant, sequence_id, *query, *positions);
    if (!attention.ok()) {
      attention = MoveField("positions", "positions.positions", attention.status());
    }
    if (attention.ok() && attention->selected.count != item.positions().count()) {
      return InvalidArgument(
          field + ".positions.positions",
          absl::StrCat(positions->size(), " of them, must be kv_heads x count = ",
                       uint64_t{attention->selected.kv_heads} * item.positions().count()));
    }
  } else {
    return InvalidArgument(field + ".tokens", "missing: selection or positions");
  }
  if (!attention.ok()) return PrefixItem(field, attention.status());
  ToWire(*attention, query->queries.shape, item.want_positions(), message);
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

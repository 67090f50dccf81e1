#include "service/handlers/query_handlers.h"
#include "proto/codec/selection.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/base/status_macros.h"
#include "service/base/refusal.h"
#include "service/wire/wire.h"

namespace pqcached::service {
namespace {

std::string Item(int index) { return absl::StrCat("items[", index, "]"); }

// Returns an error of the store with its path in the request. The fields of the store are those of
// the item, but for the sequence, which the item's query names.
absl::Status PrefixItem(const std::string& field, const absl::Status& status) {
  return PrefixField(field, MoveField("sequence_id", "query.sequence_id", status));
}

// Reads the range of an attention, which may be empty.
absl::StatusOr<kvstore::TokenRange> RangeToAttend(const v1::AttendRangeItem& item,
                                                  const std::string& field) {
  const v1::TokenRange& tokens = item.tokens();
  if (item.has_tokens() && tokens.begin() == tokens.end()) return kvstore::TokenRange{};
  return TokenRangeOf(item.has_tokens(), tokens, field + ".tokens");
}

uint32_t QueryHeadsOf(const kvstore::Query& query) {
  return query.queries.shape.size() == 3 ? static_cast<uint32_t>(query.queries.shape[1]) : 0;
}

// Returns a number of tokens that a set of the selection has at least, if the query is valid.
uint64_t LeastSelected(const kvstore::Selection& selection, uint64_t query_position) {
  if (query_position >= kvstore::kMaxSequenceTokens) return 0;  // refused when it is read
  const uint64_t attendable = query_position + 1;
  const uint64_t ends = uint64_t{selection.sink_tokens} + selection.window_tokens;
  uint64_t excluded = 0;
  for (const kvstore::PositionRange& range : selection.excluded) {
    if (range.end > range.begin) excluded += range.end - range.begin;
  }
  uint64_t budget = selection.budget_count;
  if (selection.budget_kind == kvstore::BudgetKind::kMass) budget = selection.mass_bounds().least;
  if (selection.budget_kind == kvstore::BudgetKind::kRatio) {
    if (!(selection.budget_ratio > 0 && selection.budget_ratio <= 1)) return 0;
    budget = static_cast<uint64_t>(selection.budget_ratio * static_cast<double>(attendable));
  }
  if (selection.budget_kind == kvstore::BudgetKind::kCount ||
      selection.budget_kind == kvstore::BudgetKind::kRatio) {
    budget -= std::min(budget, ends);
  }
  return std::min(budget, attendable - std::min(attendable, ends + excluded));
}

}  // namespace

absl::Status QueryHandlers::CheckPositionBytes(const Caller& caller, uint64_t sequence_id,
                                               const kvstore::Query& query,
                                               const kvstore::Selection& selection) {
  const absl::StatusOr<CacheSpecs::SharedSpec> spec = specs_.Of(caller, sequence_id);
  if (!spec.ok()) return absl::OkStatus();  // the sequence is refused when it is read
  for (const kvstore::LayerGroup& group : (*spec)->groups) {
    if (std::find(group.layers.begin(), group.layers.end(), query.layer) == group.layers.end()) {
      continue;
    }
    const uint64_t sets = selection.SetCount(group.kv_heads, group.query_heads);
    return CheckResponseBytes(
        sets * LeastSelected(selection, query.query_position) * sizeof(uint32_t),
        max_message_bytes_);
  }
  return absl::OkStatus();  // and so is the layer
}

absl::StatusOr<kvstore::Selection> QueryHandlers::ResolveSelection(const Caller& caller,
                                                                   uint64_t sequence_id,
                                                                   const v1::Selection& selection,
                                                                   const std::string& item) {
  const std::string field = item + ".selection";
  kvstore::Selection result;
  RETURN_IF_ERROR(kvstore::ToStatus(codec::Decode(selection, field, &result)));
  ASSIGN_OR_RETURN(result.index, specs_.IndexOrDefault(caller, item + ".query.sequence_id",
                                                       sequence_id, selection.has_index(),
                                                       selection.index(), field + ".index"));
  return result;
}

absl::Status QueryHandlers::TopKOne(const Caller& caller, const v1::TopKItem& item,
                                    const std::string& field, v1::Selected* message) {
  ASSIGN_OR_RETURN(const kvstore::Query query,
                   QueryOf(item.query(), field + ".query", max_message_bytes_));
  const uint64_t sequence_id = item.query().sequence_id();
  ASSIGN_OR_RETURN(const kvstore::Selection selection,
                   ResolveSelection(caller, sequence_id, item.selection(), field));
  const std::string& tenant = caller.session.tenant;
  if (item.has_pages()) {
    kvstore::PageTerms terms;
    RETURN_IF_ERROR(kvstore::ToStatus(codec::Decode(item.pages(), field + ".pages", &terms)));
    const absl::StatusOr<kvstore::SelectedPages> pages =
        store_.TopPages(tenant, sequence_id, query, selection, terms);
    if (!pages.ok()) return PrefixItem(field, pages.status());
    ToWire(*pages, message);
    return absl::OkStatus();
  }
  RETURN_IF_ERROR(CheckPositionBytes(caller, sequence_id, query, selection));
  const absl::StatusOr<kvstore::Selected> selected =
      store_.TopK(tenant, sequence_id, query, selection);
  if (!selected.ok()) return PrefixItem(field, selected.status());
  ToWire(*selected, message);
  return absl::OkStatus();
}

absl::Status QueryHandlers::TopK(const Caller& caller, const v1::TopKRequest& request,
                                 v1::TopKResponse* response) {
  RETURN_IF_ERROR(CheckCount("items", request.items_size(), kMaxBatchItems));
  for (int i = 0; i < request.items_size(); ++i) {
    RETURN_IF_ERROR(caller.Check());
    RETURN_IF_ERROR(TopKOne(caller, request.items(i), Item(i), response->add_items()));
    RETURN_IF_ERROR(CheckResponseBytes(response->ByteSizeLong(), max_message_bytes_));
  }
  return absl::OkStatus();
}

absl::Status QueryHandlers::Score(const Caller& caller, const v1::ScoreRequest& request,
                                  v1::ScoreResponse* response) {
  RETURN_IF_ERROR(CheckCount("items", request.items_size(), kMaxBatchItems));
  uint64_t bytes = 0;
  for (int i = 0; i < request.items_size(); ++i) {
    RETURN_IF_ERROR(caller.Check());
    const v1::ScoreItem& item = request.items(i);
    ASSIGN_OR_RETURN(const kvstore::Query query,
                     QueryOf(item.query(), Item(i) + ".query", max_message_bytes_));
    ASSIGN_OR_RETURN(const kvstore::TokenRange tokens,
                     TokenRangeOf(item.has_tokens(), item.tokens(), Item(i) + ".tokens"));
    const uint64_t sequence_id = item.query().sequence_id();
    ASSIGN_OR_RETURN(const kvstore::IndexDescriptor index,
                     specs_.IndexOrDefault(caller, Item(i) + ".query.sequence_id", sequence_id,
                                           item.has_index(), item.index(), Item(i) + ".index"));
    bytes += (tokens.end - tokens.begin) * QueryHeadsOf(query) * sizeof(float);
    RETURN_IF_ERROR(CheckResponseBytes(bytes, max_message_bytes_));
    const absl::StatusOr<kvstore::Scores> scores =
        store_.Score(caller.session.tenant, sequence_id, query, index, tokens);
    if (!scores.ok()) return PrefixItem(Item(i), scores.status());
    ToWire(*scores, response->add_items());
  }
  return CheckResponseBytes(response->ByteSizeLong(), max_message_bytes_);
}

absl::StatusOr<QueryHandlers::TokenShape> QueryHandlers::TokenShapeOf(const Caller& caller,
                                                                      uint64_t sequence_id,
                                                                      uint32_t layer,
                                                                      kvstore::RowPart part) {
  ASSIGN_OR_RETURN(const CacheSpecs::SharedSpec spec, specs_.Of(caller, sequence_id));
  for (const kvstore::LayerGroup& group : spec->groups) {
    if (group.kind == kvstore::LayerKind::kNone) continue;
    if (std::find(group.layers.begin(), group.layers.end(), layer) == group.layers.end()) continue;
    const uint64_t keys = part == kvstore::RowPart::kValue ? 0 : group.key_dim;
    const uint64_t values = part == kvstore::RowPart::kKey ? 0 : group.value_dim;
    return TokenShape{group.kv_heads, keys + values,
                      group.kv_heads * (keys + values) * kernels::DTypeBytes(group.dtype)};
  }
  return InvalidArgument("layer", absl::StrCat(layer, " is not stored by the cache"));
}

absl::Status QueryHandlers::FetchBlocks(const Caller& caller, const v1::FetchBlocksRequest& request,
                                        v1::FetchBlocksResponse* response) {
  FetchedBlocks fetched;
  RETURN_IF_ERROR(FetchRows(caller, request, &fetched));
  response->set_rows_epoch(fetched.rows_epoch);
  for (const kvstore::Rows& rows : fetched.blocks) ToWire(rows, response->add_blocks());
  return CheckResponseBytes(response->ByteSizeLong(), max_message_bytes_);
}

absl::Status QueryHandlers::FetchRows(const Caller& caller, const v1::FetchBlocksRequest& request,
                                      FetchedBlocks* fetched) {
  RETURN_IF_ERROR(CheckCount("ranges", request.ranges_size(), kMaxFetchRanges));
  ASSIGN_OR_RETURN(const kvstore::RowPart part, RowPartOf(request.part(), "part"));
  uint64_t token_count = 0;
  std::vector<kvstore::TokenRange> ranges;
  for (int i = 0; i < request.ranges_size(); ++i) {
    ASSIGN_OR_RETURN(const kvstore::TokenRange range,
                     TokenRangeOf(true, request.ranges(i), absl::StrCat("ranges[", i, "]")));
    token_count += range.end - range.begin;
    ranges.push_back(range);
  }
  ASSIGN_OR_RETURN(const TokenShape token,
                   TokenShapeOf(caller, request.sequence_id(), request.layer(), part));
  RETURN_IF_ERROR(CheckResponseBytes(token_count * token.bytes, max_message_bytes_));
  for (size_t i = 0; i < ranges.size(); ++i) {
    RETURN_IF_ERROR(caller.Check());
    absl::StatusOr<kvstore::Rows> rows = store_.FetchBlocks(
        caller.session.tenant, request.sequence_id(), request.layer(), ranges[i], part);
    if (!rows.ok()) {
      return MoveField("tokens", absl::StrCat("ranges[", i, "]"), rows.status());
    }
    const bool is_same = i == 0 || fetched->rows_epoch == rows->rows_epoch;
    fetched->rows_epoch = is_same ? rows->rows_epoch : 0;
    fetched->blocks.push_back(*std::move(rows));
  }
  return absl::OkStatus();
}

absl::Status QueryHandlers::FetchTokens(const Caller& caller, const v1::FetchTokensRequest& request,
                                        v1::FetchTokensResponse* response) {
  ASSIGN_OR_RETURN(const kvstore::RowPart part, RowPartOf(request.part(), "part"));
  if (request.count() == 0) return InvalidArgument("count", "0, must be at least 1");
  if (request.positions().empty()) return InvalidArgument("positions", "missing");
  ASSIGN_OR_RETURN(const TokenShape token,
                   TokenShapeOf(caller, request.sequence_id(), request.layer(), part));
  const uint64_t wanted = uint64_t{token.kv_heads} * request.count();
  if (static_cast<uint64_t>(request.positions_size()) != wanted) {
    return InvalidArgument(
        "positions",
        absl::StrCat(request.positions_size(), " of them, must be kv_heads x count = ", wanted));
  }
  RETURN_IF_ERROR(CheckResponseBytes(uint64_t{request.count()} * token.bytes, max_message_bytes_));
  ASSIGN_OR_RETURN(
      const kvstore::Rows rows,
      store_.FetchTokens(
          caller.session.tenant, request.sequence_id(), request.layer(),
          {request.positions().data(), static_cast<size_t>(request.positions_size())}, part));
  ToWire(rows, response->mutable_rows());
  return CheckResponseBytes(response->ByteSizeLong(), max_message_bytes_);
}

absl::Status QueryHandlers::AttendOne(const Caller& caller, const v1::AttendItem& item,
                                      const std::string& field, v1::Attention* message) {
  ASSIGN_OR_RETURN(const kvstore::Query query, QueryOverPositions(item, field, max_message_bytes_));
  const uint64_t sequence_id = item.query().sequence_id();
  absl::StatusOr<kvstore::Attention> attention;
  if (item.tokens_case() == v1::AttendItem::kSelection) {
    ASSIGN_OR_RETURN(const kvstore::Selection selection,
                     ResolveSelection(caller, sequence_id, item.selection(), field));
    if (item.want_positions()) {
      RETURN_IF_ERROR(CheckPositionBytes(caller, sequence_id, query, selection));
    }
    message->set_has_tail_estimate(selection.tail_estimate);
    attention =
        store_.Attend(caller.session.tenant, sequence_id, query, selection, item.want_positions());
  } else if (item.tokens_case() == v1::AttendItem::kPositions) {
    ASSIGN_OR_RETURN(
        const std::vector<uint32_t> positions,
        PositionsOf(item.positions().count(), item.positions().positions(), field + ".positions"));
    attention = store_.AttendPositions(caller.session.tenant, sequence_id, query, positions,
                                       item.positions().count());
    if (!attention.ok()) {
      attention = MoveField("positions", "positions.positions", attention.status());
      attention = MoveField("logits", "positions.logits", attention.status());
    }
  } else {
    return InvalidArgument(field + ".tokens", "missing: selection or positions");
  }
  if (!attention.ok()) return PrefixItem(field, attention.status());
  ToWire(*attention, query.queries.shape, item.want_positions(), message);
  return absl::OkStatus();
}

absl::Status QueryHandlers::Attend(const Caller& caller, const v1::AttendRequest& request,
                                   v1::AttendResponse* response) {
  RETURN_IF_ERROR(CheckCount("items", request.items_size(), kMaxBatchItems));
  for (int i = 0; i < request.items_size(); ++i) {
    RETURN_IF_ERROR(caller.Check());
    RETURN_IF_ERROR(AttendOne(caller, request.items(i), Item(i), response->add_items()));
    RETURN_IF_ERROR(CheckResponseBytes(response->ByteSizeLong(), max_message_bytes_));
  }
  return absl::OkStatus();
}

absl::Status QueryHandlers::AttendRangeOne(const Caller& caller, const v1::AttendRangeItem& item,
                                           const std::string& field, uint64_t* response_bytes,
                                           v1::Attention* message) {
  ASSIGN_OR_RETURN(const kvstore::Query query,
                   QueryOf(item.query(), field + ".query", max_message_bytes_));
  ASSIGN_OR_RETURN(const kvstore::TokenRange tokens, RangeToAttend(item, field));
  const uint64_t sequence_id = item.query().sequence_id();
  const absl::StatusOr<TokenShape> value =
      TokenShapeOf(caller, sequence_id, query.layer, kvstore::RowPart::kValue);
  if (!value.ok()) {
    return PrefixItem(field, MoveField("layer", "query.layer", value.status()));
  }
  const uint64_t length = query.queries.shape.empty() ? 0 : query.queries.shape[0];
  *response_bytes += length * QueryHeadsOf(query) * (value->dim + 1) * sizeof(float);
  RETURN_IF_ERROR(CheckResponseBytes(*response_bytes, max_message_bytes_));
  const absl::StatusOr<kvstore::Attention> attention =
      store_.AttendRange(caller.session.tenant, sequence_id, query, tokens, caller.is_cancelled);
  RETURN_IF_ERROR(caller.Check());
  if (!attention.ok()) return PrefixItem(field, attention.status());
  ToWire(*attention, query.queries.shape, /*want_positions=*/false, message);
  return absl::OkStatus();
}

absl::Status QueryHandlers::AttendRange(const Caller& caller, const v1::AttendRangeRequest& request,
                                        v1::AttendRangeResponse* response) {
  RETURN_IF_ERROR(CheckCount("items", request.items_size(), kMaxBatchItems));
  uint64_t bytes = 0;
  for (int i = 0; i < request.items_size(); ++i) {
    RETURN_IF_ERROR(
        AttendRangeOne(caller, request.items(i), Item(i), &bytes, response->add_items()));
  }
  return CheckResponseBytes(response->ByteSizeLong(), max_message_bytes_);
}

}  // namespace pqcached::service

#include "kvstore/read/reader.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>
#include <string>

#include "kernels/base/check.h"
#include "kernels/base/finite.h"
#include "kernels/base/status_macros.h"
#include "kvstore/read/indexes/index_types.h"
#include "kvstore/read/layer_ops.h"
#include "kvstore/read/range_ops.h"
#include "kvstore/read/resolve.h"
#include "kvstore/read/tail.h"

namespace pqcached::kvstore {
namespace {

// Fewer tokens than this, over all kv heads, are read before other threads would wake up.
constexpr uint64_t kParallelTokens = 2048;

Refusal Refuse(StatusCode code, std::string field, std::string text, uint32_t retry_ms = kNoRetry) {
  return {.code = code, .field = std::move(field), .text = std::move(text), .retry_ms = retry_ms};
}

// Makes each query head a kv head of its own, with the rows and codes of the one that it has.
void SplitGroups(LayerView* view) {
  view->sharing_heads = view->shape.group_size();
  view->shape.kv_heads = view->shape.query_heads;
}

// Treats the queries of several tokens as one larger group: makes the view's query heads [kv_heads,
// query_length x group_size].
void WidenGroup(LayerView* view, uint32_t query_length) { view->shape.query_heads *= query_length; }

// Copies queries [query_length, kv_heads, group_size, dim] to [kv_heads, query_length, group_size,
// dim], as floats.
void GatherQueries(const LayerQuery& query, const LayerShape& shape, std::vector<float>* queries) {
  queries->resize(size_t{query.query_length} * shape.query_heads * shape.key_dim);
  float* to = queries->data();
  for (uint32_t kv_head = 0; kv_head < shape.kv_heads; ++kv_head) {
    to = query.CopyGroup(kv_head, shape.group_size(), shape.key_dim, to);
  }
}

LayerRequest RequestOf(const LayerQuery& query, const Selection& selection) {
  return {query.layer, selection.index, "query.layer", "selection.index"};
}

// Returns whether a number may be a logit: not NaN and not +infinity.
bool IsLogit(float number) { return number <= std::numeric_limits<float>::max(); }

Refusal NotFinite(uint32_t query_head) {
  return Refuse(StatusCode::kInvalidArgument, "query.queries",
                "NaN or infinity in query head " + std::to_string(query_head));
}

// Refuses queries, grouped by kv head, that are not finite.
Refusal CheckFinite(std::span<const float> queries, const LayerShape& shape,
                    uint32_t query_length) {
  if (kernels::AllFinite(queries)) return {};
  const auto found = std::find_if_not(queries.begin(), queries.end(), kernels::IsFinite);
  const auto row = static_cast<uint32_t>((found - queries.begin()) / shape.key_dim);
  const uint32_t group = shape.group_size();
  return NotFinite(row / (group * query_length) * group + row % group);
}

// Stores outputs [kv_heads, query_length, group_size, value_dim] and their lse.
void StoreGrouped(const LayerShape& shape, uint32_t query_length, const float* output,
                  const float* lse, const AttentionOut& out) {
  const uint32_t group = shape.group_size();
  for (uint32_t kv_head = 0; kv_head < shape.kv_heads; ++kv_head) {
    for (uint32_t token = 0; token < query_length; ++token) {
      for (uint32_t head = kv_head * group; head < (kv_head + 1) * group; ++head) {
        out.Store(token, head, output, shape.value_dim, *lse++);
        output += shape.value_dim;
      }
    }
  }
}

const char* KindName(LayerKind kind) {
  if (kind == LayerKind::kValues) return "values";
  return kind == LayerKind::kFull ? "full" : "window";
}

}  // namespace

Refusal CheckKeys(const LayerShape& shape, uint32_t layer, const char* field) {
  if (shape.has_keys()) return {};
  return Refuse(StatusCode::kFailedPrecondition, field,
                "layer " + std::to_string(layer) +
                    " stores values only: attention needs positions with logits");
}

Refusal CheckKind(LayerKind kind, const LayerRequest& request) {
  if (kind == LayerKind::kSelected || !IsBuilt(request.index)) return {};
  return Refuse(StatusCode::kFailedPrecondition, request.index_field,
                "layer " + std::to_string(request.layer) + " is of kind " + KindName(kind) +
                    ", which has no index " + NameOf(request.index));
}

Refusal CheckCoded(const LayerView& view, const LayerRequest& request,
                   std::span<const PositionRange> candidates) {
  if (!IsBuilt(request.index) || candidates.empty()) return {};
  const uint32_t begin = candidates.front().begin, end = candidates.back().end;
  for (const SegmentView& segment : view.segments) {
    const uint32_t segment_end = segment.first_position + segment.token_count;
    if (segment.index_data || segment_end <= begin || segment.first_position >= end) continue;
    return Refuse(StatusCode::kAborted, request.index_field,
                  "layer " + std::to_string(request.layer) + ": index " + NameOf(request.index) +
                      " does not cover positions [" + std::to_string(segment.first_position) +
                      ", " + std::to_string(segment_end) + ") yet",
                  kRetryConflict);
  }
  return {};
}

PartBytes BytesOfPart(const LayerShape& shape, RowPart part) {
  const size_t element_bytes = kernels::DTypeBytes(shape.dtype);
  switch (part) {
    case RowPart::kRow:
      break;
    case RowPart::kKey:
      return {shape.key_dim, 0, shape.key_dim * element_bytes};
    case RowPart::kValue:
      return {shape.value_dim, shape.key_dim * element_bytes, shape.value_dim * element_bytes};
  }
  return {shape.key_dim + shape.value_dim, 0, shape.row_bytes};
}

const ParallelFor& Reader::ThreadsFor(uint64_t tokens) const {
  static const ParallelFor serial = SerialFor();
  return tokens >= kParallelTokens ? parallel_ : serial;
}

Refusal Reader::Open(const LayerQuery& query, const LayerRequest& request, LayerView* view) {
  if (query.query_position > kMaxSequenceTokens - query.query_length) {
    return Refuse(StatusCode::kInvalidArgument, "query.query_position",
                  std::to_string(query.query_position) + ", must be below " +
                      std::to_string(kMaxSequenceTokens - query.query_length + 1));
  }
  RETURN_IF_ERROR(source_.Open(request, view));
  return query.has_logits ? Refusal{} : CheckKeys(view->shape, query.layer, request.layer_field);
}

Refusal Reader::TakeQueries(const LayerQuery& query, LayerView* view) {
  GatherQueries(query, view->shape, &scratch_.queries);
  RETURN_IF_ERROR(CheckFinite(scratch_.queries, view->shape, query.query_length));
  WidenGroup(view, query.query_length);
  return {};
}

Refusal Reader::ResolveIn(const LayerQuery& query, const Selection& selection, LayerView* view,
                          SelectedTokens* selected) {
  RETURN_IF_ERROR(Open(query, RequestOf(query, selection), view));
  ResolvedSelection& resolved = scratch_.resolved;
  Resolve(selection, query.query_position, view->token_count(), &resolved);
  if (resolved.refusal.ok() && resolved.least_count < resolved.select_count) {
    RETURN_IF_ERROR(CountTokens(query, selection, *view));
  }
  *selected = {resolved.select_count, resolved.sink_tokens, resolved.window_tokens};
  return resolved.refusal;
}

void Reader::ListCandidates(uint32_t kv_heads) {
  const ResolvedSelection& resolved = scratch_.resolved;
  scratch_.positions.resize(size_t{kv_heads} * resolved.candidate_count);
  auto next = scratch_.positions.begin();
  for (uint32_t kv_head = 0; kv_head < kv_heads; ++kv_head) {
    for (const PositionRange& range : resolved.candidates) {
      const auto end = next + (range.end - range.begin);
      std::iota(next, end, range.begin);
      next = end;
    }
  }
}

void Reader::WeighOwn(const LayerView& view) {
  const uint32_t heads = view.shape.query_heads;
  scratch_.own.assign(heads, {});
  scratch_.lse.resize(size_t{2} * heads);
  const std::span<float> max = std::span(scratch_.lse).first(heads);
  const std::span<float> sum_exp = std::span(scratch_.lse).subspan(heads);
  for (PositionRange range : scratch_.resolved.own) {
    range.end = std::min(range.end, view.token_count());
    if (range.begin >= range.end) continue;
    const uint32_t tokens = range.end - range.begin;
    scratch_.output.resize(size_t{heads} * tokens);
    const ParallelFor& threads = ThreadsFor(uint64_t{tokens} * view.shape.kv_heads);
    ScoreLayer(exec_, view,
               {.index = {},
                .tokens = range,
                .queries = scratch_.queries,
                .logits = scratch_.output,
                .max = max,
                .sum_exp = sum_exp},
               threads, scratch_.Bytes(threads.worker_count * ScoreScratchBytes(view, {}, range)));
    for (uint32_t head = 0; head < heads; ++head) {
      kernels::OwnWeight& own = scratch_.own[head];
      if (own.sum_exp == 0) {
        own = {max[head], sum_exp[head]};
        continue;
      }
      const float joined = std::max(own.max, max[head]);
      own = {joined, own.sum_exp * std::exp(own.max - joined) +
                         sum_exp[head] * std::exp(max[head] - joined)};
    }
  }
}

Refusal Reader::CountTokens(const LayerQuery& query, const Selection& selection, LayerView view) {
  ResolvedSelection& resolved = scratch_.resolved;
  if (selection.per_query_head) SplitGroups(&view);
  RETURN_IF_ERROR(TakeQueries(query, &view));
  RETURN_IF_ERROR(CheckCoded(view, RequestOf(query, selection), resolved.candidates));
  WeighOwn(view);
  const ParallelFor& threads = ThreadsFor(uint64_t{resolved.candidate_count} * view.shape.kv_heads);
  const size_t bytes = CountScratchBytes(view, selection.index, resolved.candidates);
  const uint32_t count = CountLayer(exec_, view,
                                    {.index = selection.index,
                                     .rule = selection.group_rule,
                                     .candidates = resolved.candidates,
                                     .queries = scratch_.queries,
                                     .own = scratch_.own,
                                     .mass = selection.budget_ratio},
                                    threads, scratch_.Bytes(threads.worker_count * bytes));
  resolved.select_count = std::clamp(count, resolved.least_count, resolved.select_count);
  resolved.least_count = resolved.select_count;
  resolved.shortlist_count = ShortlistCount(selection, resolved);
  return {};
}

Refusal Reader::Select(const LayerQuery& query, const Selection& selection, bool want_logits,
                       LayerView* view) {
  const ResolvedSelection& resolved = scratch_.resolved;
  scratch_.logits.clear();
  if (selection.per_query_head) SplitGroups(view);
  RETURN_IF_ERROR(TakeQueries(query, view));
  RETURN_IF_ERROR(CheckCoded(*view, RequestOf(query, selection), resolved.candidates));
  scratch_.positions.resize(size_t{view->shape.kv_heads} * resolved.select_count);
  if (resolved.select_count == 0) return {};
  // A shortlist of all candidates needs no index: exact scores select from all of them.
  const bool scores_all = resolved.shortlist_count >= resolved.candidate_count;
  if (want_logits && !scores_all && resolved.shortlist_count > resolved.select_count) {
    ResizeWithRoom(size_t{view->shape.query_heads} * resolved.select_count, &scratch_.logits);
  }
  const ParallelFor& threads =
      ThreadsFor(uint64_t{resolved.candidate_count} * view->shape.kv_heads);
  const SelectLayerArgs args{.index = scores_all ? IndexDescriptor{} : selection.index,
                             .rule = selection.group_rule,
                             .candidates = resolved.candidates,
                             .queries = scratch_.queries,
                             .select_count = resolved.select_count,
                             .shortlist_count = scores_all ? 0 : resolved.shortlist_count,
                             .positions = scratch_.positions,
                             .logits = scratch_.logits};
  SelectLayer(exec_, *view, args, threads,
              scratch_.Bytes(threads.worker_count * SelectScratchBytes(exec_, *view, args)));
  return {};
}

Refusal Reader::TopK(const LayerQuery& query, const Selection& given, SelectedTokens* selected) {
  const Selection selection = TermsOf(source_.KindOf(query.layer), given);
  LayerView view;
  RETURN_IF_ERROR(ResolveIn(query, selection, &view, selected));
  if (!scratch_.resolved.takes_all()) {
    return Select(query, selection, /*want_logits=*/false, &view);
  }
  const uint32_t sets = selection.SetCount(view.shape.kv_heads, view.shape.query_heads);
  RETURN_IF_ERROR(TakeQueries(query, &view));
  ListCandidates(sets);
  return {};
}

void Reader::ScoreCandidates(const LayerView& view, const IndexDescriptor& index) {
  const ResolvedSelection& resolved = scratch_.resolved;
  const size_t heads = view.shape.query_heads;
  const ParallelFor& threads = ThreadsFor(uint64_t{resolved.candidate_count} * view.shape.kv_heads);
  ResizeWithRoom(heads * resolved.candidate_count, &scratch_.pages.logits);
  std::span<float> logits = scratch_.pages.logits;
  for (const PositionRange& range : resolved.candidates) {
    const size_t count = heads * (range.end - range.begin);
    ScoreLayer(exec_, view,
               {.index = index,
                .tokens = range,
                .queries = scratch_.queries,
                .logits = logits.first(count),
                .max = {},
                .sum_exp = {}},
               threads,
               scratch_.Bytes(threads.worker_count * ScoreScratchBytes(view, index, range)));
    logits = logits.subspan(count);
  }
}

Refusal Reader::TopPages(const LayerQuery& query, const Selection& given, const PageTerms& terms,
                         const PageLists& out) {
  const Selection selection = TermsOf(source_.KindOf(query.layer), given);
  if (selection.rerank_factor != 1.0f) {
    return Refuse(StatusCode::kUnimplemented, "selection.rerank_factor",
                  "pages are selected by the index alone; must be 0 or 1");
  }
  if (selection.tail_estimate) {
    return Refuse(StatusCode::kUnimplemented, "selection.tail_estimate",
                  "pages have no attention to add it to; must be false");
  }
  if (selection.budget_kind == BudgetKind::kMass) {
    return Refuse(StatusCode::kUnimplemented, "selection.attention_mass",
                  "lists of pages have a length that is known before; not supported for pages");
  }
  if (selection.per_query_head) {
    return Refuse(StatusCode::kUnimplemented, "selection.group_rule",
                  "per query head: block tables have no list of pages for each query head");
  }
  LayerView view;
  SelectedTokens selected;
  RETURN_IF_ERROR(ResolveIn(query, selection, &view, &selected));
  RETURN_IF_ERROR(TakeQueries(query, &view));
  const ResolvedSelection& resolved = scratch_.resolved;
  PagePlan& plan = scratch_.pages.plan;
  PlanPages(selection, resolved, {query.query_position, query.query_length}, terms, &plan);
  if (!plan.takes_all()) {
    RETURN_IF_ERROR(CheckCoded(view, RequestOf(query, selection), resolved.candidates));
    ScoreCandidates(view, selection.index);
  }
  SelectPages(exec_,
              {.kv_heads = view.shape.kv_heads,
               .group_size = view.shape.group_size(),
               .rule = selection.group_rule,
               .terms = terms,
               .candidates = resolved.candidates,
               .logits = scratch_.pages.logits},
              ThreadsFor(uint64_t{resolved.candidate_count} * view.shape.kv_heads), &scratch_.pages,
              out);
  return {};
}

Refusal Reader::Attend(const LayerQuery& query, const Selection& given, bool want_positions,
                       SelectedTokens* selected, const AttentionOut& out) {
  const Selection selection = TermsOf(source_.KindOf(query.layer), given);
  LayerView view;
  RETURN_IF_ERROR(ResolveIn(query, selection, &view, selected));
  if (scratch_.resolved.takes_all()) {
    if (want_positions) {
      ListCandidates(selection.SetCount(view.shape.kv_heads, view.shape.query_heads));
    }
    return AttendToRanges(view, query, scratch_.resolved.candidates, out);
  }
  const std::optional<IndexDescriptor> clusters = source_.FindIndex(IndexKind::kClusters);
  if (selection.tail_estimate && !clusters) {
    return Refuse(StatusCode::kFailedPrecondition, "selection.tail_estimate",
                  "the sequence has no index of the type clusters: build one");
  }
  RETURN_IF_ERROR(Select(query, selection, /*want_logits=*/true, &view));
  AttendOver(view, query, {.positions = scratch_.positions, .logits = scratch_.logits});
  if (selection.tail_estimate) RETURN_IF_ERROR(EstimateTail(query, selection, *clusters));
  StoreAttention(view, query, out);
  return {};
}

Refusal Reader::EstimateTail(const LayerQuery& query, const Selection& selection,
                             const IndexDescriptor& clusters) {
  LayerView view;
  RETURN_IF_ERROR(
      Open(query, {query.layer, clusters, "query.layer", "selection.tail_estimate"}, &view));
  if (selection.per_query_head) SplitGroups(&view);
  WidenGroup(&view, query.query_length);
  const ParallelFor& threads =
      ThreadsFor(uint64_t{scratch_.resolved.candidate_count} * view.shape.kv_heads);
  const size_t most_clusters = MostClusters(view, clusters);
  AddTail(exec_, view,
          {.index = clusters,
           .most_clusters = most_clusters,
           .candidates = scratch_.resolved.candidates,
           .positions = scratch_.positions,
           .queries = scratch_.queries,
           .output = scratch_.output,
           .lse = scratch_.lse},
          threads, scratch_.Bytes(threads.worker_count * TailScratchBytes(view, most_clusters)));
  return {};
}

Refusal Reader::AttendPositions(const LayerQuery& query, std::span<const uint32_t> positions,
                                uint32_t count, const AttentionOut& out) {
  LayerView view;
  RETURN_IF_ERROR(Open(query, {.layer = query.layer, .layer_field = "query.layer"}, &view));
  const LayerShape& shape = view.shape;
  if (positions.size() == uint64_t{shape.query_heads} * count) {
    SplitGroups(&view);
  } else if (positions.size() != uint64_t{shape.kv_heads} * count) {
    return Refuse(
        StatusCode::kInvalidArgument, "positions",
        std::to_string(positions.size()) + " of them, must be kv_heads x count = " +
            std::to_string(uint64_t{shape.kv_heads} * count) +
            ", or query_heads x count = " + std::to_string(uint64_t{shape.query_heads} * count));
  }
  RETURN_IF_ERROR(CheckPositions(view, positions, /*ascending=*/true));
  return AttendChosen(query, {.positions = positions}, &view, out);
}

Refusal Reader::AttendLists(const LayerQuery& query,
                            std::span<const std::span<const uint32_t>> lists,
                            const AttentionOut& out) {
  LayerView view;
  RETURN_IF_ERROR(Open(query, {.layer = query.layer, .layer_field = "query.layer"}, &view));
  if (lists.size() == view.shape.query_heads) SplitGroups(&view);
  PQC_CHECK(lists.size() == view.shape.kv_heads);
  for (size_t head = 0; head < lists.size(); ++head) {
    // A list that several heads have is checked once.
    if (head > 0 && lists[head].data() == lists[head - 1].data() &&
        lists[head].size() == lists[head - 1].size()) {
      continue;
    }
    RETURN_IF_ERROR(CheckList(lists[head], head, view.token_count()));
  }
  return AttendChosen(query, {.lists = lists}, &view, out);
}

Refusal Reader::TakeLogits(const LayerQuery& query, const LayerView& view, const Chosen& chosen) {
  const uint32_t kv_heads = view.shape.kv_heads, group = view.shape.group_size();
  size_t tokens = chosen.positions.size();
  for (const std::span<const uint32_t>& list : chosen.lists) tokens += list.size();
  ResizeWithRoom(tokens * group * query.query_length, &scratch_.logits);
  float* to = scratch_.logits.data();
  for (uint32_t kv_head = 0; kv_head < kv_heads; ++kv_head) {
    const size_t count =
        chosen.lists.empty() ? chosen.positions.size() / kv_heads : chosen.lists[kv_head].size();
    float* const end = query.CopyGroup(kv_head, group, static_cast<uint32_t>(count), to);
    const float* const bad = std::find_if_not(to, end, IsLogit);
    if (bad != end) {
      const auto row = static_cast<uint32_t>(static_cast<size_t>(bad - to) / count);
      return Refuse(
          StatusCode::kInvalidArgument, "logits",
          "NaN or infinity in query head " + std::to_string(kv_head * group + row % group));
    }
    to = end;
  }
  return {};
}

Refusal Reader::AttendChosen(const LayerQuery& query, Chosen chosen, LayerView* view,
                             const AttentionOut& out) {
  if (query.has_logits) {
    RETURN_IF_ERROR(TakeLogits(query, *view, chosen));
    WidenGroup(view, query.query_length);
    chosen.logits = scratch_.logits;
  } else {
    RETURN_IF_ERROR(TakeQueries(query, view));
  }
  AttendOver(*view, query, chosen);
  StoreAttention(*view, query, out);
  return {};
}

Refusal Reader::AttendRange(const LayerQuery& query, TokenRange tokens, const AttentionOut& out) {
  LayerView view;
  RETURN_IF_ERROR(Open(query, {.layer = query.layer, .layer_field = "query.layer"}, &view));
  if (tokens.begin == tokens.end) return AttendToRanges(view, query, {}, out);
  RETURN_IF_ERROR(CheckTokens(tokens, view.token_count()));
  const PositionRange rows{static_cast<uint32_t>(tokens.begin), static_cast<uint32_t>(tokens.end)};
  return AttendToRanges(view, query, {&rows, 1}, out);
}

Refusal Reader::AttendToRanges(const LayerView& view, const LayerQuery& query,
                               std::span<const PositionRange> rows, const AttentionOut& out) {
  uint64_t tokens = 0;
  for (const PositionRange& range : rows) tokens += range.end - range.begin;
  const uint32_t bad_head =
      AttendRangeLayer(exec_, view, {.query = query, .rows = rows, .out = out},
                       ThreadsFor(tokens * view.shape.kv_heads * query.query_length), scratch_);
  return bad_head == kNoQueryHead ? Refusal{} : NotFinite(bad_head);
}

void Reader::AttendOver(const LayerView& view, const LayerQuery& query, const Chosen& chosen) {
  const size_t rows = view.shape.query_heads;  // of all query tokens
  const uint32_t value_dim = view.shape.value_dim;
  scratch_.output.resize(rows * value_dim);
  scratch_.lse.resize(rows);
  uint64_t tokens = chosen.positions.size();
  for (const std::span<const uint32_t>& list : chosen.lists) tokens += list.size();
  const ParallelFor& threads = ThreadsFor(tokens);
  AttendLayer(exec_, view,
              {.queries = query.has_logits ? std::span<const float>() : scratch_.queries,
               .positions = chosen.positions,
               .lists = chosen.lists,
               .logits = chosen.logits,
               .output = scratch_.output,
               .lse = scratch_.lse},
              threads, scratch_.Bytes(threads.worker_count * AttendLayerScratchBytes(view)));
}

void Reader::StoreAttention(const LayerView& view, const LayerQuery& query,
                            const AttentionOut& out) {
  LayerShape shape = view.shape;
  shape.query_heads /= query.query_length;
  StoreGrouped(shape, query.query_length, scratch_.output.data(), scratch_.lse.data(), out);
}

Refusal Reader::Score(const LayerQuery& query, const IndexDescriptor& index, TokenRange tokens,
                      const ScoresOut& out) {
  const LayerRequest request{query.layer, index, "query.layer", "index"};
  LayerView view;
  RETURN_IF_ERROR(Open(query, request, &view));
  RETURN_IF_ERROR(TakeQueries(query, &view));
  RETURN_IF_ERROR(CheckTokens(tokens, view.token_count()));
  const PositionRange range{static_cast<uint32_t>(tokens.begin), static_cast<uint32_t>(tokens.end)};
  RETURN_IF_ERROR(CheckCoded(view, request, {&range, 1}));
  const uint64_t count = tokens.end - tokens.begin;
  const uint32_t heads = view.shape.query_heads;
  if (!out.logits) scratch_.output.resize(heads * count);
  scratch_.lse.resize(size_t{2} * heads);
  float* logits = out.logits ? out.logits : scratch_.output.data();
  float* max = out.max ? out.max : scratch_.lse.data();
  float* sum_exp = out.sum_exp ? out.sum_exp : scratch_.lse.data() + heads;
  const ParallelFor& threads = ThreadsFor(count * view.shape.kv_heads);
  ScoreLayer(exec_, view,
             {.index = index,
              .tokens = range,
              .queries = scratch_.queries,
              .logits = {logits, heads * count},
              .max = {max, heads},
              .sum_exp = {sum_exp, heads}},
             threads, scratch_.Bytes(threads.worker_count * ScoreScratchBytes(view, index, range)));
  return {};
}

}  // namespace pqcached::kvstore

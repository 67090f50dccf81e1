#include "kvstore/rows/reader.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/base/status_macros.h"
#include "kernels/rows/gather.h"
#include "kvstore/checksum/verify.h"
#include "kvstore/read/layer_ops.h"
#include "kvstore/read/resolve.h"
#include "kvstore/refusal.h"
#include "kvstore/rows/tensor.h"

namespace pqcached::kvstore {
namespace {

// Number of rows, over all kv heads, below which a call finishes before other threads would wake
// up.
constexpr uint64_t kParallelTokens = 2048;

// A LayerView together with the arrays that it points to.
struct OwnedView {
  uint32_t layer_slot = 0;
  std::vector<SegmentView> segments;
  LayerView view;
};

absl::StatusOr<OwnedView> ViewLayer(const Reading& reading, uint32_t layer) {
  ASSIGN_OR_RETURN(const uint32_t slot, reading.cache->LayerSlot(layer));
  const StoredLayers::Layer& stored = reading.cache->layers.layers[slot];
  OwnedView owned;
  owned.layer_slot = slot;
  const uint32_t layer_tokens = reading.snapshot->layer_tokens[slot];
  const std::vector<SegmentEntry>& entries = reading.snapshot->list->segments;
  for (size_t i = 0; i < entries.size(); ++i) {
    const SegmentRows& rows = *entries[i].rows;
    if (rows.first_position() >= layer_tokens) break;
    RETURN_IF_ERROR(VerifyRows(*reading.cache, rows, slot));
    const uint32_t end = entries[i].closed ? entries[i].token_end : layer_tokens;
    owned.segments.push_back({.first_position = rows.first_position(),
                              .token_count = std::min(end, layer_tokens) - rows.first_position(),
                              .rows = rows.heads(stored)});
  }
  owned.view = {.shape = stored.shape, .segments = owned.segments};
  return owned;
}

// Adds codes and centroids to the view. Errors: kFailedPrecondition when the sequence lacks the
// index, kAborted when it is under way.
absl::Status AddIndex(const Reading& reading, const IndexDescriptor& index, std::string_view field,
                      OwnedView& owned) {
  RETURN_IF_ERROR(ValidateIndex(index, owned.view.shape.key_dim, field));
  if (index.kind == IndexKind::kFlat) return absl::OkStatus();
  const SegmentList& list = *reading.snapshot->list;
  const size_t ordinal = list.Find(index);
  if (ordinal == list.indexes.size()) {
    return FailedPrecondition(absl::string_view(field.data(), field.size()),
                              absl::StrCat("the sequence has no index pq m=", index.subspace_count,
                                           " b=", index.bits, ": build it"));
  }
  if (!list.index_ready(ordinal, owned.layer_slot)) {
    return Aborted(absl::string_view(field.data(), field.size()),
                   absl::StrCat("layer ", reading.cache->layers.layers[owned.layer_slot].layer,
                                ": index pq m=", index.subspace_count, " b=", index.bits,
                                " is not ready in all segments"),
                   kRetryConflict);
  }
  for (size_t i = 0; i < owned.segments.size(); ++i) {
    const SegmentIndex& data = *list.segments[i].indexes[ordinal];
    RETURN_IF_ERROR(VerifyIndex(*reading.cache, *list.segments[i].rows, data, owned.layer_slot));
    owned.segments[i].index_data = &data.header(owned.layer_slot);
    owned.segments[i].codebook = &data.codebook(owned.layer_slot)->header();
  }
  return absl::OkStatus();
}

ParallelFor ChooseParallel(const Reading& reading, uint64_t tokens) {
  return tokens >= kParallelTokens ? reading.cache->compute.serving.parallel_for() : SerialFor();
}

absl::StatusOr<ResolvedSelection> ResolveOrError(const Selection& selection, uint64_t position,
                                                 uint32_t stored) {
  ResolvedSelection resolved = Resolve(selection, position, stored);
  if (!resolved.refusal.ok()) return ToStatus(resolved.refusal);
  return resolved;
}

// A checked query with its layer. The query's tokens are processed together: in the view, their
// query heads form groups of query_length times the layer's group size.
struct PreparedQuery {
  OwnedView owned;
  uint32_t query_length = 1;
  std::vector<float> queries;  // [kv_heads, query_length, the layer's group size, key_dim]
};

absl::StatusOr<PreparedQuery> Prepare(const Reading& reading, const Query& query) {
  auto owned = ViewLayer(reading, query.layer);
  if (!owned.ok()) return PrefixField("query", owned.status());
  auto queries = QueriesToFloats(query.queries, owned->view.shape);
  if (!queries.ok()) return PrefixField("query", queries.status());
  const uint32_t length = queries->query_length;
  if (query.query_position > kMaxSequenceTokens - length) {
    return InvalidArgument(
        "query.query_position",
        absl::StrCat(query.query_position, ", must be below ", kMaxSequenceTokens - length + 1));
  }
  PreparedQuery prepared{
      .owned = *std::move(owned), .query_length = length, .queries = std::move(queries->data)};
  prepared.owned.view.segments = prepared.owned.segments;
  prepared.owned.view.shape.query_heads *= length;
  return prepared;
}

absl::StatusOr<Selected> Select(const Reading& reading, const Query& query,
                                const Selection& selection, PreparedQuery& prepared) {
  RETURN_IF_ERROR(AddIndex(reading, selection.index, "selection.index", prepared.owned));
  const LayerView& view = prepared.owned.view;
  ASSIGN_OR_RETURN(const auto resolved,
                   ResolveOrError(selection, query.query_position, view.token_count()));
  Selected selected{.kv_heads = view.shape.kv_heads,
                    .count = resolved.select_count,
                    .positions = {},
                    .sink_tokens = resolved.sink_tokens,
                    .window_tokens = resolved.window_tokens};
  selected.positions.resize(size_t{selected.kv_heads} * selected.count);
  if (selected.count == 0) return selected;
  const kernels::Exec& exec = reading.cache->compute.exec;
  const ParallelFor parallel =
      ChooseParallel(reading, uint64_t{resolved.candidate_count} * selected.kv_heads);
  const ScratchPool::Buffer scratch = reading.cache->compute.scratch.Take(
      parallel.worker_count * SelectScratchBytes(exec, view, selection.index, resolved.candidates));
  SelectLayer(exec, view,
              {.index = selection.index,
               .rule = selection.group_rule,
               .candidates = resolved.candidates,
               .queries = prepared.queries,
               .select_count = selected.count,
               .positions = selected.positions},
              parallel, scratch.bytes());
  return selected;
}

// Reorders [kv_heads, query_length, group, size] to [query_length, kv_heads, group, size].
std::vector<float> ByToken(std::span<const float> by_head, const LayerShape& shape,
                           uint32_t query_length, size_t size) {
  const size_t run = shape.group_size() / query_length * size;
  std::vector<float> by_token(by_head.size());
  for (uint32_t kv_head = 0; kv_head < shape.kv_heads; ++kv_head) {
    for (uint32_t token = 0; token < query_length; ++token) {
      const auto from =
          by_head.begin() + static_cast<ptrdiff_t>((size_t{kv_head} * query_length + token) * run);
      std::copy_n(from, run,
                  by_token.begin() +
                      static_cast<ptrdiff_t>((size_t{token} * shape.kv_heads + kv_head) * run));
    }
  }
  return by_token;
}

Attention Attend(const Reading& reading, const PreparedQuery& prepared,
                 std::span<const uint32_t> positions) {
  const LayerView& view = prepared.owned.view;
  Attention attention;
  attention.output.resize(size_t{view.shape.query_heads} * view.shape.value_dim);
  attention.lse.resize(view.shape.query_heads);
  const ParallelFor parallel = ChooseParallel(reading, positions.size());
  const ScratchPool::Buffer scratch =
      reading.cache->compute.scratch.Take(parallel.worker_count * AttendLayerScratchBytes(view));
  AttendLayer(reading.cache->compute.exec, view,
              {.queries = prepared.queries,
               .positions = positions,
               .output = attention.output,
               .lse = attention.lse},
              parallel, scratch.bytes());
  if (prepared.query_length > 1) {
    attention.output =
        ByToken(attention.output, view.shape, prepared.query_length, view.shape.value_dim);
    attention.lse = ByToken(attention.lse, view.shape, prepared.query_length, 1);
  }
  return attention;
}

absl::Status CheckPositions(const LayerView& view, std::span<const uint32_t> positions,
                            bool ascending) {
  if (positions.size() % view.shape.kv_heads != 0) {
    return InvalidArgument("positions",
                           absl::StrCat(positions.size(), " of them; not a multiple of kv_heads, ",
                                        view.shape.kv_heads));
  }
  const uint32_t stored = view.token_count();
  const size_t per_head = positions.size() / view.shape.kv_heads;
  for (size_t i = 0; i < positions.size(); ++i) {
    if (positions[i] >= stored) {
      return OutOfRange(absl::StrCat("positions[", i, "]"),
                        absl::StrCat(positions[i], "; ", stored, " tokens are stored"));
    }
    if (ascending && i % per_head != 0 && positions[i] <= positions[i - 1]) {
      return InvalidArgument(absl::StrCat("positions[", i, "]"),
                             absl::StrCat(positions[i], " after ", positions[i - 1],
                                          ", must ascend within a kv head"));
    }
  }
  return absl::OkStatus();
}

absl::Status CheckTokens(TokenRange tokens, uint32_t stored) {
  if (tokens.begin >= tokens.end) {
    return InvalidArgument("tokens",
                           absl::StrCat("[", tokens.begin, ", ", tokens.end, ") is empty"));
  }
  if (tokens.end > stored) {
    return OutOfRange("tokens", absl::StrCat("[", tokens.begin, ", ", tokens.end, "); ", stored,
                                             " tokens are stored"));
  }
  return absl::OkStatus();
}

// Bytes [begin, begin + size) of a row.
struct PartBytes {
  uint32_t dim = 0;
  size_t begin = 0;
  size_t size = 0;
};

absl::StatusOr<PartBytes> BytesOfPart(const LayerShape& shape, RowPart part) {
  const size_t element_bytes = kernels::DTypeBytes(shape.dtype);
  switch (part) {
    case RowPart::kRow:
      return PartBytes{shape.key_dim + shape.value_dim, 0, shape.row_bytes};
    case RowPart::kKey:
      return PartBytes{shape.key_dim, 0, shape.key_dim * element_bytes};
    case RowPart::kValue:
      return PartBytes{shape.value_dim, shape.key_dim * element_bytes,
                       shape.value_dim * element_bytes};
  }
  return InvalidArgument("part", "unknown");
}

// Gathers the rows of one kv head at `positions` into `target`: ascending positions in one call,
// others one by one.
void GatherHead(const kernels::Exec& exec, const LayerView& view, uint32_t kv_head,
                std::span<const uint32_t> positions, const PartBytes& part,
                std::span<std::byte> target) {
  const std::vector<kernels::RowSpan> spans = RowSpans(view, kv_head);
  const bool ascending = std::adjacent_find(positions.begin(), positions.end(),
                                            std::greater_equal<uint32_t>()) == positions.end();
  const size_t step = ascending ? std::max<size_t>(positions.size(), 1) : 1;
  for (size_t i = 0; i < positions.size(); i += step) {
    kernels::GatherRows(exec, {.row_stride_bytes = view.shape.row_bytes,
                               .part_begin_bytes = part.begin,
                               .part_bytes = part.size,
                               .spans = spans,
                               .positions = positions.subspan(i, step),
                               .target_stride_bytes = part.size,
                               .target = target.subspan(i * part.size, step * part.size)});
  }
}

Rows EmptyRows(const LayerShape& shape, const PartBytes& part, size_t tokens) {
  Rows rows{.dtype = shape.dtype,
            .kv_heads = shape.kv_heads,
            .tokens = static_cast<uint32_t>(tokens),
            .dim = part.dim,
            .data = {}};
  rows.data.resize(size_t{shape.kv_heads} * tokens * part.size);
  return rows;
}

}  // namespace

absl::StatusOr<Selected> SelectTokens(const Reading& reading, const Query& query,
                                      const Selection& selection) {
  ASSIGN_OR_RETURN(auto prepared, Prepare(reading, query));
  return Select(reading, query, selection, prepared);
}

absl::StatusOr<Scores> ScoreTokens(const Reading& reading, const Query& query,
                                   const IndexDescriptor& index, TokenRange tokens) {
  ASSIGN_OR_RETURN(auto prepared, Prepare(reading, query));
  if (prepared.query_length > 1) {
    return InvalidArgument("query.queries.shape",
                           absl::StrCat("query length is ", prepared.query_length,
                                        ", must be 1: Score takes one query token"));
  }
  RETURN_IF_ERROR(AddIndex(reading, index, "index", prepared.owned));
  const LayerView& view = prepared.owned.view;
  RETURN_IF_ERROR(CheckTokens(tokens, view.token_count()));
  const PositionRange range{static_cast<uint32_t>(tokens.begin), static_cast<uint32_t>(tokens.end)};
  const uint32_t count = range.end - range.begin;
  Scores scores;
  scores.logits.resize(size_t{view.shape.query_heads} * count);
  scores.max.resize(view.shape.query_heads);
  scores.sum_exp.resize(view.shape.query_heads);
  const ParallelFor parallel = ChooseParallel(reading, uint64_t{count} * view.shape.kv_heads);
  const ScratchPool::Buffer scratch = reading.cache->compute.scratch.Take(
      parallel.worker_count * ScoreScratchBytes(view, index, range));
  ScoreLayer(reading.cache->compute.exec, view,
             {.index = index,
              .tokens = range,
              .queries = prepared.queries,
              .logits = scores.logits,
              .max = scores.max,
              .sum_exp = scores.sum_exp},
             parallel, scratch.bytes());
  return scores;
}

absl::StatusOr<Rows> FetchRows(const Reading& reading, uint32_t layer, TokenRange tokens,
                               RowPart part) {
  ASSIGN_OR_RETURN(const auto owned, ViewLayer(reading, layer));
  const LayerShape& shape = owned.view.shape;
  ASSIGN_OR_RETURN(const auto bytes, BytesOfPart(shape, part));
  const LayerView view{.shape = shape, .segments = owned.segments};
  RETURN_IF_ERROR(CheckTokens(tokens, view.token_count()));
  std::vector<uint32_t> positions(tokens.end - tokens.begin);
  std::iota(positions.begin(), positions.end(), static_cast<uint32_t>(tokens.begin));
  Rows rows = EmptyRows(shape, bytes, positions.size());
  const size_t head_bytes = positions.size() * bytes.size;
  for (uint32_t kv_head = 0; kv_head < shape.kv_heads; ++kv_head) {
    GatherHead(reading.cache->compute.exec, view, kv_head, positions, bytes,
               std::span(rows.data).subspan(kv_head * head_bytes, head_bytes));
  }
  return rows;
}

absl::StatusOr<Rows> FetchRowsAt(const Reading& reading, uint32_t layer,
                                 std::span<const uint32_t> positions, RowPart part) {
  ASSIGN_OR_RETURN(const auto owned, ViewLayer(reading, layer));
  const LayerShape& shape = owned.view.shape;
  ASSIGN_OR_RETURN(const auto bytes, BytesOfPart(shape, part));
  const LayerView view{.shape = shape, .segments = owned.segments};
  RETURN_IF_ERROR(CheckPositions(view, positions, /*ascending=*/false));
  const size_t per_head = positions.size() / shape.kv_heads;
  Rows rows = EmptyRows(shape, bytes, per_head);
  const size_t head_bytes = per_head * bytes.size;
  for (uint32_t kv_head = 0; kv_head < shape.kv_heads; ++kv_head) {
    GatherHead(reading.cache->compute.exec, view, kv_head,
               positions.subspan(kv_head * per_head, per_head), bytes,
               std::span(rows.data).subspan(kv_head * head_bytes, head_bytes));
  }
  return rows;
}

absl::StatusOr<Attention> AttendSelection(const Reading& reading, const Query& query,
                                          const Selection& selection, bool want_positions) {
  ASSIGN_OR_RETURN(auto prepared, Prepare(reading, query));
  ASSIGN_OR_RETURN(auto selected, Select(reading, query, selection, prepared));
  Attention attention = Attend(reading, prepared, selected.positions);
  attention.selected = std::move(selected);
  if (!want_positions) attention.selected.positions.clear();
  return attention;
}

absl::StatusOr<Attention> AttendAt(const Reading& reading, const Query& query,
                                   std::span<const uint32_t> positions) {
  ASSIGN_OR_RETURN(const auto prepared, Prepare(reading, query));
  const LayerView& view = prepared.owned.view;
  RETURN_IF_ERROR(CheckPositions(view, positions, /*ascending=*/true));
  Attention attention = Attend(reading, prepared, positions);
  attention.selected.kv_heads = view.shape.kv_heads;
  attention.selected.count = static_cast<uint32_t>(positions.size() / view.shape.kv_heads);
  return attention;
}

}  // namespace pqcached::kvstore

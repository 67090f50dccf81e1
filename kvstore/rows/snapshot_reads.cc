#include "kvstore/rows/snapshot_reads.h"

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/base/status_macros.h"
#include "kvstore/checksum/verify.h"
#include "kvstore/read/indexes/index_types.h"
#include "kvstore/read/reader.h"
#include "kvstore/refusal.h"
#include "kvstore/rows/tensor.h"

namespace pqcached::kvstore {
namespace {

// Work of an attention over a range between two checks whether its caller still waits, in query
// tokens x rows; but at least a tile of tokens.
constexpr uint64_t kRangeSliceWork = uint64_t{1} << 22;
constexpr uint64_t kMinSliceTokens = 64;

// The layers of a snapshot. Verifies what a reader is about to read.
class SnapshotSource final : public LayerSource {
 public:
  explicit SnapshotSource(const Reading& reading) : reading_(reading) {}

  LayerKind KindOf(uint32_t layer) const override {
    const absl::StatusOr<uint32_t> slot = reading_.cache->LayerSlot(layer);
    return slot.ok() ? reading_.cache->layers.layers[*slot].shape.kind : LayerKind::kSelected;
  }

  Refusal Open(const LayerRequest& request, LayerView* view) override {
    const absl::StatusOr<uint32_t> slot = reading_.cache->LayerSlot(request.layer);
    if (!slot.ok()) return RefusalOf(ReplaceField(request.layer_field, slot.status()));
    const LayerShape& shape = reading_.cache->layers.layers[*slot].shape;
    RETURN_IF_ERROR(CheckIndex(request.index, shape.key_dim, request.index_field));
    RETURN_IF_ERROR(CheckKind(shape.kind, request));
    if (absl::Status status = AddRows(*slot); !status.ok()) return RefusalOf(status);
    if (IsBuilt(request.index)) {
      if (absl::Status status = AddCodes(*slot, request); !status.ok()) return RefusalOf(status);
    }
    *view = {.shape = shape, .segments = segments_};
    return {};
  }

  std::optional<IndexDescriptor> FindIndex(IndexKind kind) const override {
    for (const IndexDescriptor& index : reading_.snapshot->list->indexes) {
      if (index.kind == kind) return index;
    }
    return std::nullopt;
  }

 private:
  absl::Status AddRows(uint32_t slot) {
    const StoredLayers::Layer& stored = reading_.cache->layers.layers[slot];
    const uint32_t layer_tokens = reading_.snapshot->layer_tokens[slot];
    segments_.clear();
    for (const SegmentEntry& entry : reading_.snapshot->list->segments) {
      const SegmentRows& rows = *entry.rows;
      if (rows.first_position() >= layer_tokens) break;
      RETURN_IF_ERROR(VerifyRows(*reading_.cache, rows, slot));
      const uint32_t end = entry.closed ? entry.token_end : layer_tokens;
      segments_.push_back({.first_position = rows.first_position(),
                           .token_count = std::min(end, layer_tokens) - rows.first_position(),
                           .rows = rows.heads(stored)});
    }
    return absl::OkStatus();
  }

  absl::Status AddCodes(uint32_t slot, const LayerRequest& request) {
    const SegmentList& list = *reading_.snapshot->list;
    const size_t ordinal = list.Find(request.index);
    if (ordinal == list.indexes.size()) {
      return FailedPrecondition(
          request.index_field,
          absl::StrCat("the sequence has no index ", NameOf(request.index), ": build it"));
    }
    for (size_t i = 0; i < segments_.size(); ++i) {
      const SegmentEntry& entry = list.segments[i];
      const SegmentIndex* data =
          ordinal < entry.indexes.size() ? entry.indexes[ordinal].get() : nullptr;
      if (data == nullptr || !data->ready(slot)) continue;
      RETURN_IF_ERROR(VerifyIndex(*reading_.cache, *entry.rows, *data, slot));
      segments_[i].index_data = &data->header(slot);
      segments_[i].codebook = &data->codebook(slot)->header();
    }
    return absl::OkStatus();
  }

  const Reading& reading_;
  std::vector<SegmentView> segments_;
};

// A Reader of one snapshot, with all that it works with.
class SnapshotReader {
 public:
  explicit SnapshotReader(const Reading& reading)
      : compute_(reading.cache->compute),
        source_(reading),
        parallel_(compute_.serving.parallel_for()),
        scratch_(compute_.read_scratch) {}

  Reader* operator->() { return &reader_; }
  const ReadScratch& scratch() { return *scratch_; }

 private:
  Compute& compute_;
  SnapshotSource source_;
  const ParallelFor parallel_;
  ReadScratchPool::Loan scratch_;
  Reader reader_{source_, compute_.exec, parallel_, *scratch_};
};

// What a snapshot has of one layer.
struct LayerContent {
  LayerShape shape;
  uint32_t token_count = 0;

  // Returns the number of tokens of a range; 0 for one that a reader refuses, which so gets no
  // memory.
  uint64_t TokensOf(TokenRange tokens) const {
    return tokens.begin < tokens.end && tokens.end <= token_count ? tokens.end - tokens.begin : 0;
  }
};

absl::StatusOr<LayerContent> FindLayer(const Reading& reading, uint32_t layer, const char* field) {
  const absl::StatusOr<uint32_t> slot = reading.cache->LayerSlot(layer);
  if (!slot.ok()) return ReplaceField(field, slot.status());
  return LayerContent{reading.cache->layers.layers[*slot].shape,
                      reading.snapshot->layer_tokens[*slot]};
}

struct CheckedQuery {
  LayerContent layer;
  LayerQuery query;

  size_t rows() const { return size_t{query.query_length} * layer.shape.query_heads; }
};

// Takes checked queries, or logits in their place.
CheckedQuery Take(const LayerContent& layer, const Query& query, const CheckedTensor& tensor) {
  CheckedQuery checked{.layer = layer,
                       .query = {.layer = query.layer,
                                 .query_position = query.query_position,
                                 .query_length = static_cast<uint32_t>(tensor.shape[0]),
                                 .data = tensor.data,
                                 .dtype = tensor.dtype,
                                 .has_logits = query.has_logits}};
  std::copy(tensor.strides_bytes.begin(), tensor.strides_bytes.end(), checked.query.strides_bytes);
  return checked;
}

absl::StatusOr<CheckedQuery> Check(const Reading& reading, const Query& query,
                                   bool of_range = false) {
  ASSIGN_OR_RETURN(const LayerContent layer, FindLayer(reading, query.layer, "query.layer"));
  RETURN_IF_ERROR(ToStatus(CheckKeys(layer.shape, query.layer, "query.layer")));
  const auto check = of_range ? CheckRangeQueries : CheckQueries;
  ASSIGN_OR_RETURN(const CheckedTensor tensor, check(query.queries, layer.shape, "query.queries"));
  return Take(layer, query, tensor);
}

// Checks a query over `count` given positions per set.
absl::StatusOr<CheckedQuery> CheckGiven(const Reading& reading, const Query& query,
                                        uint32_t count) {
  if (!query.has_logits) return Check(reading, query);
  ASSIGN_OR_RETURN(const LayerContent layer, FindLayer(reading, query.layer, "query.layer"));
  ASSIGN_OR_RETURN(const CheckedTensor tensor,
                   CheckLogits(query.queries, layer.shape, count, "logits"));
  return Take(layer, query, tensor);
}

Selected SelectedOf(const SelectedTokens& selected, const Selection& selection,
                    const LayerShape& shape) {
  return {.kv_heads = selection.SetCount(shape.kv_heads, shape.query_heads),
          .count = selected.count,
          .positions = {},
          .sink_tokens = selected.sink_tokens,
          .window_tokens = selected.window_tokens};
}

Attention MakeAttention(const CheckedQuery& checked) {
  Attention attention;
  attention.output.resize(checked.rows() * checked.layer.shape.value_dim);
  attention.lse.resize(checked.rows());
  return attention;
}

AttentionOut OutOf(Attention& attention, const LayerShape& shape) {
  return AttentionOut::Packed(attention.output.data(), attention.lse.data(), shape.query_heads,
                              shape.value_dim);
}

Rows MakeRows(const LayerShape& shape, RowPart part, size_t tokens) {
  const PartBytes bytes = BytesOfPart(shape, part);
  Rows rows{.dtype = shape.dtype,
            .kv_heads = shape.kv_heads,
            .tokens = static_cast<uint32_t>(tokens),
            .dim = bytes.dim,
            .data = {}};
  rows.data.resize(size_t{shape.kv_heads} * tokens * bytes.size);
  return rows;
}

absl::Status CheckPart(RowPart part) {
  return part <= RowPart::kValue ? absl::OkStatus() : InvalidArgument("part", "unknown");
}

}  // namespace

absl::StatusOr<Selected> TopK(const Reading& reading, const Query& query,
                              const Selection& selection) {
  ASSIGN_OR_RETURN(const CheckedQuery checked, Check(reading, query));
  SnapshotReader reader(reading);
  SelectedTokens counts;
  RETURN_IF_ERROR(ToStatus(reader->TopK(checked.query, selection, &counts)));
  Selected selected = SelectedOf(counts, selection, checked.layer.shape);
  selected.positions = reader.scratch().positions;
  return selected;
}

absl::StatusOr<SelectedPages> TopPages(const Reading& reading, const Query& query,
                                       const Selection& selection, const PageTerms& terms) {
  ASSIGN_OR_RETURN(const CheckedQuery checked, Check(reading, query));
  const LayerShape& shape = checked.layer.shape;
  const Selection in_layer = TermsOf(shape.kind, selection);
  const ResolvedSelection resolved =
      Resolve(in_layer, checked.query.query_position, checked.layer.token_count);
  RETURN_IF_ERROR(ToStatus(resolved.refusal));
  PagePlan plan;
  PlanPages(in_layer, resolved, {checked.query.query_position, checked.query.query_length}, terms,
            &plan);
  SelectedPages selected{.kv_heads = shape.kv_heads,
                         .list_count = ListCount(terms, shape.kv_heads),
                         .length = plan.length(),
                         .pages = {}};
  selected.pages.resize(size_t{selected.list_count} * selected.length);
  SnapshotReader reader(reading);
  RETURN_IF_ERROR(ToStatus(
      reader->TopPages(checked.query, selection, terms, {selected.pages.data(), selected.length})));
  return selected;
}

absl::StatusOr<Scores> Score(const Reading& reading, const Query& query,
                             const IndexDescriptor& index, TokenRange tokens) {
  ASSIGN_OR_RETURN(const CheckedQuery checked, Check(reading, query));
  if (checked.query.query_length > 1) {
    return InvalidArgument("query.queries.shape",
                           absl::StrCat("query length is ", checked.query.query_length,
                                        ", must be 1: Score takes one query token"));
  }
  const uint32_t heads = checked.layer.shape.query_heads;
  Scores scores;
  scores.logits.resize(heads * checked.layer.TokensOf(tokens));
  scores.max.resize(heads);
  scores.sum_exp.resize(heads);
  SnapshotReader reader(reading);
  RETURN_IF_ERROR(ToStatus(reader->Score(checked.query, index, tokens,
                                         {.logits = scores.logits.data(),
                                          .max = scores.max.data(),
                                          .sum_exp = scores.sum_exp.data()})));
  return scores;
}

absl::StatusOr<Rows> FetchBlocks(const Reading& reading, uint32_t layer, TokenRange tokens,
                                 RowPart part) {
  ASSIGN_OR_RETURN(const LayerContent content, FindLayer(reading, layer, "layer"));
  RETURN_IF_ERROR(CheckPart(part));
  Rows rows = MakeRows(content.shape, part, content.TokensOf(tokens));
  rows.rows_epoch = reading.snapshot->rows_epoch;
  RETURN_IF_ERROR(ToStatus(SnapshotReader(reading)->FetchBlocks(layer, tokens, part, rows.data)));
  return rows;
}

absl::StatusOr<Rows> FetchTokens(const Reading& reading, uint32_t layer,
                                 std::span<const uint32_t> positions, RowPart part) {
  ASSIGN_OR_RETURN(const LayerContent content, FindLayer(reading, layer, "layer"));
  RETURN_IF_ERROR(CheckPart(part));
  Rows rows = MakeRows(content.shape, part, positions.size() / content.shape.kv_heads);
  RETURN_IF_ERROR(
      ToStatus(SnapshotReader(reading)->FetchTokens(layer, positions, part, rows.data)));
  return rows;
}

absl::StatusOr<Attention> Attend(const Reading& reading, const Query& query,
                                 const Selection& selection, bool want_positions) {
  ASSIGN_OR_RETURN(const CheckedQuery checked, Check(reading, query));
  Attention attention = MakeAttention(checked);
  SnapshotReader reader(reading);
  SelectedTokens counts;
  RETURN_IF_ERROR(ToStatus(reader->Attend(checked.query, selection, want_positions, &counts,
                                          OutOf(attention, checked.layer.shape))));
  attention.selected = SelectedOf(counts, selection, checked.layer.shape);
  if (want_positions) attention.selected.positions = reader.scratch().positions;
  return attention;
}

absl::StatusOr<Attention> AttendPositions(const Reading& reading, const Query& query,
                                          std::span<const uint32_t> positions, uint32_t count) {
  ASSIGN_OR_RETURN(const CheckedQuery checked, CheckGiven(reading, query, count));
  Attention attention = MakeAttention(checked);
  RETURN_IF_ERROR(ToStatus(SnapshotReader(reading)->AttendPositions(
      checked.query, positions, count, OutOf(attention, checked.layer.shape))));
  attention.selected.kv_heads =
      count == 0 ? checked.layer.shape.kv_heads : static_cast<uint32_t>(positions.size() / count);
  attention.selected.count = count;
  return attention;
}

absl::StatusOr<Attention> AttendRange(const Reading& reading, const Query& query, TokenRange tokens,
                                      const std::function<bool()>& is_cancelled) {
  ASSIGN_OR_RETURN(const CheckedQuery checked, Check(reading, query, /*of_range=*/true));
  Attention attention = MakeAttention(checked);
  const AttentionOut out = OutOf(attention, checked.layer.shape);
  SnapshotReader reader(reading);
  const uint64_t step = std::max<uint64_t>(
      kRangeSliceWork / std::max<uint64_t>(checked.layer.TokensOf(tokens), 1), kMinSliceTokens);
  for (uint64_t begin = 0; begin < checked.query.query_length; begin += step) {
    if (is_cancelled && is_cancelled()) return Cancelled("the caller has left");
    const LayerQuery slice = checked.query.Slice(
        static_cast<uint32_t>(begin),
        static_cast<uint32_t>(std::min<uint64_t>(begin + step, checked.query.query_length)));
    RETURN_IF_ERROR(ToStatus(reader->AttendRange(slice, tokens, out.From(begin))));
  }
  attention.selected.kv_heads = checked.layer.shape.kv_heads;
  attention.selected.count = static_cast<uint32_t>(tokens.end - tokens.begin);
  return attention;
}

}  // namespace pqcached::kvstore

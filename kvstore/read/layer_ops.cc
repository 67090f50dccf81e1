#include "kvstore/read/layer_ops.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <new>

#include "kernels/attend/attend.h"
#include "kernels/base/check.h"
#include "kernels/select/exact/exact_score.h"
#include "kernels/select/pq_select.h"
#include "kernels/select/pq_table.h"
#include "kernels/select/score_select.h"

namespace pqcached::kvstore {
namespace {

// A run of candidate slots of one segment.
struct Piece {
  const SegmentView* segment = nullptr;
  uint32_t slot_begin = 0;
  uint32_t slot_end = 0;
  uint32_t codebook = 0;  // ordinal among the codebooks of the plan

  uint32_t token_count() const { return slot_end - slot_begin; }
  uint32_t first_position() const { return segment->first_position + slot_begin; }
};

// Candidates cut at segment boundaries. Stored in the first worker's scratch and read by all
// workers.
struct Plan {
  std::span<const Piece> pieces;
  std::span<const CodebookHeader* const> codebooks;  // of the pieces; neighbours may share
  uint32_t token_count = 0;
};

struct PlanSize {
  size_t piece_count = 0;
  size_t codebook_count = 0;
  uint32_t token_count = 0;
};

// Calls take(piece, codebook) for every piece in order, with piece.codebook set.
template <typename Take>
PlanSize ForEachPiece(const LayerView& view, std::span<const PositionRange> ranges, Take take) {
  PlanSize size;
  const CodebookHeader* newest = nullptr;
  size_t next_segment = 0;
  for (const PositionRange& range : ranges) {
    PQC_CHECK(range.begin < range.end && range.end <= view.token_count());
    for (size_t i = next_segment; i < view.segments.size(); ++i) {
      const SegmentView& segment = view.segments[i];
      const uint32_t segment_end = segment.first_position + segment.token_count;
      if (segment.first_position >= range.end) break;
      next_segment = i;
      const uint32_t begin = std::max(range.begin, segment.first_position);
      const uint32_t end = std::min(range.end, segment_end);
      if (begin >= end) continue;
      if (size.codebook_count == 0 || newest != segment.codebook) {
        newest = segment.codebook;
        ++size.codebook_count;
      }
      take(Piece{.segment = &segment,
                 .slot_begin = begin - segment.first_position,
                 .slot_end = end - segment.first_position,
                 .codebook = static_cast<uint32_t>(size.codebook_count - 1)},
           newest);
      ++size.piece_count;
      size.token_count += end - begin;
    }
  }
  return size;
}

PlanSize SizeOf(const LayerView& view, std::span<const PositionRange> ranges) {
  return ForEachPiece(view, ranges, [](const Piece&, const CodebookHeader*) {});
}

// Returns true when the layer is selected from explicit logits. PqSelect adds plain table entries
// and cannot apply a softcap.
bool NeedsLogits(const LayerShape& shape, const IndexDescriptor& index) {
  return index.kind == IndexKind::kFlat || shape.softcap > 0;
}

// Sizes of the parts of one worker's scratch, in memory order.
struct ScratchParts {
  size_t piece_bytes = 0;     // the plan; only in the first worker's scratch
  size_t codebook_bytes = 0;  // the plan; only in the first worker's scratch
  size_t span_bytes = 0;      // the pieces in the form that the kernel reads
  size_t table_bytes = 0;
  size_t logit_bytes = 0;
  size_t kernel_bytes = 0;
  size_t shortlist_bytes = 0;  // positions that the index proposes

  size_t total() const {
    return PaddedBytes(piece_bytes) + PaddedBytes(codebook_bytes) + PaddedBytes(span_bytes) +
           PaddedBytes(table_bytes) + PaddedBytes(logit_bytes) + PaddedBytes(kernel_bytes) +
           PaddedBytes(shortlist_bytes);
  }
};

// Returns whether the index only proposes candidates.
bool Reranks(const SelectLayerArgs& args) { return args.shortlist_count > args.select_count; }

ScratchParts TableParts(const LayerShape& shape, const IndexDescriptor& index,
                        const PlanSize& plan) {
  ScratchParts parts;
  parts.piece_bytes = plan.piece_count * sizeof(Piece);
  parts.codebook_bytes = plan.codebook_count * sizeof(void*);  // pointers to headers
  if (index.kind == IndexKind::kPq) {
    parts.table_bytes = plan.codebook_count * shape.group_size() * sizeof(float) *
                        kernels::TableFloats(GeometryOf(index, shape.key_dim));
  } else {
    parts.kernel_bytes = kernels::ExactScoreScratchBytes(shape.group_size(), shape.key_dim);
  }
  return parts;
}

ScratchParts SelectParts(const kernels::Exec& exec, const LayerShape& shape,
                         const IndexDescriptor& index, const PlanSize& plan) {
  ScratchParts parts = TableParts(shape, index, plan);
  const uint32_t group = shape.group_size();
  if (NeedsLogits(shape, index)) {
    parts.span_bytes = plan.piece_count * sizeof(kernels::ScoreSpan);
    parts.logit_bytes = size_t{plan.token_count} * group * sizeof(float);
    parts.kernel_bytes =
        std::max(parts.kernel_bytes, kernels::ScoreSelectScratchBytes(group, plan.token_count));
  } else {
    parts.span_bytes = plan.piece_count * sizeof(kernels::PqSpan);
    parts.kernel_bytes = kernels::PqSelectScratchBytes(
        exec, {.geometry = GeometryOf(index, shape.key_dim),
               .group_size = group,
               .codebook_count = static_cast<uint32_t>(plan.codebook_count),
               .candidate_count = plan.token_count});
  }
  return parts;
}

ScratchParts PartsOf(const kernels::Exec& exec, const LayerView& view,
                     const SelectLayerArgs& args) {
  ScratchParts parts = SelectParts(exec, view.shape, args.index, SizeOf(view, args.candidates));
  if (!Reranks(args)) return parts;
  parts.shortlist_bytes = size_t{args.shortlist_count} * sizeof(uint32_t);
  // The index has done its work when re-ranking begins, which takes its place.
  parts.kernel_bytes = std::max(parts.kernel_bytes, RerankScratchBytes(view, args.shortlist_count));
  return parts;
}

struct Scratch {
  std::byte* pieces = nullptr;
  std::byte* codebooks = nullptr;
  std::byte* spans = nullptr;
  std::span<float> tables;
  std::span<float> logits;
  std::span<std::byte> kernel;
  std::span<uint32_t> shortlist;
};

Scratch Cut(std::span<std::byte> scratch, const ScratchParts& parts, uint32_t worker) {
  std::byte* next = scratch.data() + worker * parts.total();
  PQC_CHECK((worker + 1) * parts.total() <= scratch.size());
  const auto take = [&next](size_t bytes) {
    std::byte* begin = next;
    next += PaddedBytes(bytes);
    return begin;
  };
  Scratch cut;
  cut.pieces = take(parts.piece_bytes);
  cut.codebooks = take(parts.codebook_bytes);
  cut.spans = take(parts.span_bytes);
  cut.tables = {reinterpret_cast<float*>(take(parts.table_bytes)),
                parts.table_bytes / sizeof(float)};
  cut.logits = {reinterpret_cast<float*>(take(parts.logit_bytes)),
                parts.logit_bytes / sizeof(float)};
  cut.kernel = {take(parts.kernel_bytes), parts.kernel_bytes};
  cut.shortlist = {reinterpret_cast<uint32_t*>(take(parts.shortlist_bytes)),
                   parts.shortlist_bytes / sizeof(uint32_t)};
  return cut;
}

// Writes the plan into the first worker's scratch.
Plan MakePlan(const LayerView& view, std::span<const PositionRange> ranges, const Scratch& first) {
  Piece* const pieces = reinterpret_cast<Piece*>(first.pieces);
  const auto** const codebooks = reinterpret_cast<const CodebookHeader**>(first.codebooks);
  Piece* next = pieces;
  const PlanSize size =
      ForEachPiece(view, ranges, [&](const Piece& piece, const CodebookHeader* codebook) {
        codebooks[piece.codebook] = codebook;
        new (next++) Piece(piece);
      });
  return {.pieces = {pieces, size.piece_count},
          .codebooks = {codebooks, size.codebook_count},
          .token_count = size.token_count};
}

// Work on one kv head.
struct HeadTask {
  const kernels::Exec& exec;
  const LayerShape& shape;
  const IndexDescriptor& index;
  const Plan& plan;
  uint32_t kv_head = 0;
  std::span<const float> queries;  // [G, key_dim]
  Scratch scratch;
};

std::span<const float> HeadQueries(const LayerShape& shape, std::span<const float> queries,
                                   uint32_t kv_head) {
  const size_t floats = size_t{shape.group_size()} * shape.key_dim;
  return queries.subspan(kv_head * floats, floats);
}

// Returns the part [G, k] of one kv head of logits [query_heads, k], which may be empty.
template <class Float>
std::span<Float> HeadLogits(const LayerShape& shape, std::span<Float> logits, uint32_t kv_head) {
  const size_t floats = logits.size() / shape.kv_heads;
  return logits.subspan(kv_head * floats, floats);
}

// Fills the tables of every codebook, [codebooks, G, m, 2^b].
void FillTables(const HeadTask& task) {
  const size_t floats =
      task.shape.group_size() * kernels::TableFloats(GeometryOf(task.index, task.shape.key_dim));
  for (size_t i = 0; i < task.plan.codebooks.size(); ++i) {
    kernels::BuildTables(task.exec, {.geometry = GeometryOf(*task.plan.codebooks[i]),
                                     .group_size = task.shape.group_size(),
                                     .queries = task.queries,
                                     .scale = task.shape.scale,
                                     .centroids = Centroids(*task.plan.codebooks[i], task.kv_head),
                                     .tables = task.scratch.tables.subspan(i * floats, floats)});
  }
}

kernels::PqSpan SpanOf(const Piece& piece, uint32_t kv_head) {
  const IndexDataHeader& header = *piece.segment->index_data;
  kernels::PqSpan span{.planes = Planes(header, kv_head),
                       .plane_stride = header.plane_stride_bytes,
                       .slot_begin = piece.slot_begin,
                       .slot_end = piece.slot_end,
                       .first_position = piece.segment->first_position,
                       .codebook = piece.codebook};
  if (header.cell_count == 0) return span;
  const uint32_t counted_end = header.counted_end.load(std::memory_order_acquire);
  const uint32_t overlap_begin = std::max(header.counted_begin, piece.slot_begin);
  const uint32_t overlap_end = std::min(counted_end, piece.slot_end);
  if (overlap_begin >= overlap_end) return span;
  span.counted_begin = header.counted_begin;
  span.counted_end = counted_end;
  if (header.posting_slots_stride_bytes > 0) {
    span.posting_begins = PostingBegins(header, kv_head);
    span.posting_slots = PostingSlots(header, kv_head);
  }
  // Stored counts save a pass over the slots, but each slot that lies in only one of the two ranges
  // needs a correction.
  const uint32_t overlap = overlap_end - overlap_begin;
  const uint32_t differing =
      piece.token_count() - overlap + (counted_end - header.counted_begin) - overlap;
  if (differing <= piece.token_count() / 2) span.cell_counts = CellCounts(header, kv_head);
  return span;
}

// Computes the logits of one piece, [G, stride]; pq requires filled tables.
void ScorePiece(const HeadTask& task, const Piece& piece, float* logits, size_t stride) {
  const uint32_t group = task.shape.group_size();
  const uint32_t tokens = piece.token_count();
  if (task.index.kind == IndexKind::kFlat) {
    kernels::ExactScores(task.exec, {.dtype = task.shape.dtype,
                                     .key_dim = task.shape.key_dim,
                                     .row_stride_bytes = task.shape.row_bytes,
                                     .group_size = group,
                                     .token_count = tokens,
                                     .scale = task.shape.scale,
                                     .queries = task.queries,
                                     .rows = piece.segment->rows[task.kv_head] +
                                             size_t{piece.slot_begin} * task.shape.row_bytes,
                                     .score_stride = stride,
                                     .scores = {logits, (group - 1) * stride + tokens},
                                     .scratch = task.scratch.kernel});
  } else {
    const kernels::PqGeometry geometry = GeometryOf(task.index, task.shape.key_dim);
    const size_t floats = kernels::TableFloats(geometry);
    // Heads are scored one at a time, because rows of `logits` are `stride` apart.
    for (uint32_t head = 0; head < group; ++head) {
      kernels::PqScore(task.exec, {.geometry = geometry,
                                   .group_size = 1,
                                   .span = SpanOf(piece, task.kv_head),
                                   .tables = task.scratch.tables.subspan(
                                       (size_t{piece.codebook} * group + head) * floats, floats),
                                   .logits = {logits + head * stride, tokens}});
    }
  }
  for (uint32_t head = 0; head < group; ++head)
    CapLogits(task.shape, {logits + head * stride, tokens});
}

void SelectByLogits(const HeadTask& task, GroupRule rule, std::span<uint32_t> positions) {
  auto* const spans = reinterpret_cast<kernels::ScoreSpan*>(task.scratch.spans);
  size_t count = 0;
  size_t column = 0;
  for (const Piece& piece : task.plan.pieces) {
    float* logits = task.scratch.logits.data() + column;
    ScorePiece(task, piece, logits, task.plan.token_count);
    new (spans + count++) kernels::ScoreSpan{.logits = logits,
                                             .head_stride = task.plan.token_count,
                                             .token_count = piece.token_count(),
                                             .first_position = piece.first_position()};
    column += piece.token_count();
  }
  kernels::ScoreSelect(task.exec, {.group_size = task.shape.group_size(),
                                   .rule = rule,
                                   .spans = {spans, count},
                                   .positions = positions,
                                   .scratch = task.scratch.kernel});
}

void SelectByCodes(const HeadTask& task, GroupRule rule, std::span<uint32_t> positions) {
  auto* const spans = reinterpret_cast<kernels::PqSpan*>(task.scratch.spans);
  size_t count = 0;
  for (const Piece& piece : task.plan.pieces) {
    new (spans + count++) kernels::PqSpan(SpanOf(piece, task.kv_head));
  }
  kernels::PqSelect(task.exec, {.geometry = GeometryOf(task.index, task.shape.key_dim),
                                .group_size = task.shape.group_size(),
                                .rule = rule,
                                .spans = {spans, count},
                                .tables = task.scratch.tables,
                                .positions = positions,
                                .scratch = task.scratch.kernel});
}

}  // namespace

size_t SelectScratchBytes(const kernels::Exec& exec, const LayerView& view,
                          const SelectLayerArgs& args) {
  return PartsOf(exec, view, args).total();
}

void SelectLayer(const kernels::Exec& exec, const LayerView& view, const SelectLayerArgs& args,
                 const ParallelFor& parallel, std::span<std::byte> scratch) {
  const LayerShape& shape = view.shape;
  if (args.select_count == 0) return;
  PQC_CHECK(args.positions.size() == size_t{shape.kv_heads} * args.select_count);
  const ScratchParts parts = PartsOf(exec, view, args);
  const Plan plan = MakePlan(view, args.candidates, Cut(scratch, parts, 0));
  PQC_CHECK(std::max(args.select_count, args.shortlist_count) <= plan.token_count);
  const auto select_head = [&](uint32_t kv_head, uint32_t worker) {
    const HeadTask task{.exec = exec,
                        .shape = shape,
                        .index = args.index,
                        .plan = plan,
                        .kv_head = kv_head,
                        .queries = HeadQueries(shape, args.queries, kv_head),
                        .scratch = Cut(scratch, parts, worker)};
    const std::span<uint32_t> positions =
        args.positions.subspan(size_t{kv_head} * args.select_count, args.select_count);
    const std::span<uint32_t> proposed = Reranks(args) ? task.scratch.shortlist : positions;
    if (args.index.kind == IndexKind::kPq) FillTables(task);
    if (NeedsLogits(shape, args.index)) {
      SelectByLogits(task, args.rule, proposed);
    } else {
      SelectByCodes(task, args.rule, proposed);
    }
    if (!Reranks(args)) return;
    Rerank(exec, view,
           {.kv_head = kv_head,
            .rule = args.rule,
            .queries = task.queries,
            .shortlist = task.scratch.shortlist,
            .positions = positions,
            .logits = HeadLogits(shape, args.logits, kv_head)},
           task.scratch.kernel);
  };
  parallel.run(shape.kv_heads, std::cref(select_head));  // a reference, because a copy allocates
}

size_t ScoreScratchBytes(const LayerView& view, const IndexDescriptor& index,
                         PositionRange tokens) {
  return TableParts(view.shape, index, SizeOf(view, {&tokens, 1})).total();
}

void ScoreLayer(const kernels::Exec& exec, const LayerView& view, const ScoreLayerArgs& args,
                const ParallelFor& parallel, std::span<std::byte> scratch) {
  const LayerShape& shape = view.shape;
  const size_t token_count = args.tokens.end - args.tokens.begin;
  PQC_CHECK(args.logits.size() == shape.query_heads * token_count);
  const ScratchParts parts = TableParts(shape, args.index, SizeOf(view, {&args.tokens, 1}));
  const Plan plan = MakePlan(view, {&args.tokens, 1}, Cut(scratch, parts, 0));
  const auto score_head = [&](uint32_t kv_head, uint32_t worker) {
    const HeadTask task{.exec = exec,
                        .shape = shape,
                        .index = args.index,
                        .plan = plan,
                        .kv_head = kv_head,
                        .queries = HeadQueries(shape, args.queries, kv_head),
                        .scratch = Cut(scratch, parts, worker)};
    if (args.index.kind == IndexKind::kPq) FillTables(task);
    const uint32_t first_head = kv_head * shape.group_size();
    float* column = args.logits.data() + first_head * token_count;
    for (const Piece& piece : plan.pieces) {
      ScorePiece(task, piece, column, token_count);
      column += piece.token_count();
    }
    if (args.max.empty()) return;
    for (uint32_t head = first_head; head < first_head + shape.group_size(); ++head) {
      const std::span<const float> logits = args.logits.subspan(head * token_count, token_count);
      const float max = *std::max_element(logits.begin(), logits.end());
      double sum = 0;
      for (const float logit : logits) sum += std::exp(static_cast<double>(logit) - max);
      args.max[head] = max;
      args.sum_exp[head] = static_cast<float>(sum);
    }
  };
  parallel.run(shape.kv_heads, std::cref(score_head));
}

namespace {

kernels::AttendShape AttendShapeOf(const LayerShape& shape) {
  return {.dtype = shape.dtype,
          .key_dim = shape.key_dim,
          .value_dim = shape.value_dim,
          .row_stride_bytes = shape.row_bytes,
          .group_size = shape.group_size(),
          .query_length = 1};
}

}  // namespace

size_t AttendLayerScratchBytes(const LayerView& view) {
  return PaddedBytes(view.segments.size() * sizeof(kernels::RowSpan)) +
         PaddedBytes(kernels::AttendScratchBytes(AttendShapeOf(view.shape)));
}

void AttendLayer(const kernels::Exec& exec, const LayerView& view, const AttendLayerArgs& args,
                 const ParallelFor& parallel, std::span<std::byte> scratch) {
  const LayerShape& shape = view.shape;
  const size_t scratch_bytes = AttendLayerScratchBytes(view);
  PQC_CHECK(parallel.worker_count * scratch_bytes <= scratch.size());
  PQC_CHECK(args.lists.empty() || args.lists.size() == shape.kv_heads);
  const size_t span_bytes = PaddedBytes(view.segments.size() * sizeof(kernels::RowSpan));
  const size_t select_count = args.positions.size() / shape.kv_heads;
  const uint32_t group = shape.group_size();
  const auto attend_head = [&](uint32_t kv_head, uint32_t worker) {
    const std::span<std::byte> own = scratch.subspan(worker * scratch_bytes, scratch_bytes);
    const size_t output_floats = size_t{group} * shape.value_dim;
    const kernels::AttendArgs rows{
        .shape = AttendShapeOf(shape),
        .scale = shape.scale,
        .softcap = shape.softcap,
        .queries = HeadQueries(shape, args.queries, kv_head),
        .spans = FillRowSpans(view, kv_head, own.first(span_bytes)),
        .positions = args.lists.empty()
                         ? args.positions.subspan(kv_head * select_count, select_count)
                         : args.lists[kv_head],
        .output = args.output.subspan(kv_head * output_floats, output_floats),
        .lse = args.lse.subspan(size_t{kv_head} * group, group),
        .scratch = own.subspan(span_bytes),
        .logits = HeadLogits(shape, args.logits, kv_head)};
    if (args.logits.empty()) {
      kernels::AttendRows(exec, rows);
    } else {
      kernels::AttendScored(exec, rows);
    }
  };
  parallel.run(shape.kv_heads, std::cref(attend_head));
}

}  // namespace pqcached::kvstore

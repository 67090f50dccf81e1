#include "kvstore/read/layer_ops.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels/attend.h"
#include "kernels/check.h"
#include "kernels/exact_score.h"
#include "kernels/pq_select.h"
#include "kernels/pq_table.h"
#include "kernels/score_select.h"

namespace pqcached::kvstore {
namespace {

constexpr size_t kScratchAlignment = 64;

size_t AlignUp(size_t bytes) {
  return (bytes + kScratchAlignment - 1) / kScratchAlignment * kScratchAlignment;
}

// A run of candidate slots of one segment.
struct Piece {
  const SegmentView* segment = nullptr;
  uint32_t slot_begin = 0;
  uint32_t slot_end = 0;
  uint32_t codebook = 0;  // ordinal among the codebooks in use

  uint32_t token_count() const { return slot_end - slot_begin; }
  uint32_t first_position() const { return segment->first_position + slot_begin; }
};

// The candidates cut at segment boundaries.
struct Plan {
  std::vector<Piece> pieces;
  std::vector<const CodebookHeader*> codebooks;  // of the pieces; neighbours share
  uint32_t token_count = 0;
};

Plan MakePlan(const LayerView& view, std::span<const PositionRange> ranges) {
  Plan plan;
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
      if (plan.codebooks.empty() || plan.codebooks.back() != segment.codebook) {
        plan.codebooks.push_back(segment.codebook);
      }
      plan.pieces.push_back({.segment = &segment,
                             .slot_begin = begin - segment.first_position,
                             .slot_end = end - segment.first_position,
                             .codebook = static_cast<uint32_t>(plan.codebooks.size() - 1)});
      plan.token_count += end - begin;
    }
  }
  return plan;
}

// PqSelect adds up plain table entries: a softcap takes the way over logits.
bool TakesLogits(const LayerShape& shape, const IndexDescriptor& index) {
  return index.kind == IndexKind::kFlat || shape.softcap > 0;
}

// Sizes of one worker's scratch, in this order.
struct ScratchParts {
  size_t table_bytes = 0;
  size_t logit_bytes = 0;
  size_t kernel_bytes = 0;

  size_t total() const {
    return AlignUp(table_bytes) + AlignUp(logit_bytes) + AlignUp(kernel_bytes);
  }
};

ScratchParts TableParts(const LayerShape& shape, const IndexDescriptor& index, const Plan& plan) {
  ScratchParts parts;
  if (index.kind == IndexKind::kPq) {
    parts.table_bytes = plan.codebooks.size() * shape.group_size() * sizeof(float) *
                        kernels::TableFloats(GeometryOf(index, shape.key_dim));
  } else {
    parts.kernel_bytes = kernels::ExactScoreScratchBytes(shape.group_size(), shape.key_dim);
  }
  return parts;
}

ScratchParts SelectParts(const kernels::Exec& exec, const LayerShape& shape,
                         const IndexDescriptor& index, const Plan& plan) {
  ScratchParts parts = TableParts(shape, index, plan);
  const uint32_t group = shape.group_size();
  if (TakesLogits(shape, index)) {
    parts.logit_bytes = size_t{plan.token_count} * group * sizeof(float);
    parts.kernel_bytes =
        std::max(parts.kernel_bytes, kernels::ScoreSelectScratchBytes(group, plan.token_count));
  } else {
    parts.kernel_bytes = kernels::PqSelectScratchBytes(
        exec, {.geometry = GeometryOf(index, shape.key_dim),
               .group_size = group,
               .codebook_count = static_cast<uint32_t>(plan.codebooks.size()),
               .candidate_count = plan.token_count});
  }
  return parts;
}

struct Scratch {
  std::span<float> tables;
  std::span<float> logits;
  std::span<std::byte> kernel;
};

Scratch Cut(std::span<std::byte> scratch, const ScratchParts& parts, uint32_t worker) {
  std::byte* begin = scratch.data() + worker * parts.total();
  PQC_CHECK((worker + 1) * parts.total() <= scratch.size());
  std::byte* logits = begin + AlignUp(parts.table_bytes);
  std::byte* kernel = logits + AlignUp(parts.logit_bytes);
  return {.tables = {reinterpret_cast<float*>(begin), parts.table_bytes / sizeof(float)},
          .logits = {reinterpret_cast<float*>(logits), parts.logit_bytes / sizeof(float)},
          .kernel = {kernel, parts.kernel_bytes}};
}

// One kv head at work.
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

// The tables of every codebook, [codebooks, G, m, 2^b].
void FillTables(const HeadTask& task) {
  const kernels::PqGeometry geometry = GeometryOf(task.index, task.shape.key_dim);
  const size_t floats = task.shape.group_size() * kernels::TableFloats(geometry);
  for (size_t i = 0; i < task.plan.codebooks.size(); ++i) {
    kernels::BuildTables(task.exec, {.geometry = geometry,
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
  // Stored counts save a pass over the slots, but every slot in one of the two ranges alone is
  // corrected for.
  const uint32_t overlap = overlap_end - overlap_begin;
  const uint32_t differing =
      piece.token_count() - overlap + (counted_end - header.counted_begin) - overlap;
  if (differing > piece.token_count() / 2) return span;
  span.cell_counts = CellCounts(header, kv_head);
  span.counted_begin = header.counted_begin;
  span.counted_end = counted_end;
  return span;
}

void CapLogits(const LayerShape& shape, std::span<float> logits) {
  if (shape.softcap <= 0) return;
  for (float& logit : logits) logit = shape.softcap * std::tanh(logit / shape.softcap);
}

// Logits of one piece, [G, stride]; pq needs filled tables.
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
    for (uint32_t head = 0; head < group;
         ++head) {  // one at a time: rows of `logits` are `stride` apart
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
  std::vector<kernels::ScoreSpan> spans;
  spans.reserve(task.plan.pieces.size());
  size_t column = 0;
  for (const Piece& piece : task.plan.pieces) {
    float* logits = task.scratch.logits.data() + column;
    ScorePiece(task, piece, logits, task.plan.token_count);
    spans.push_back({.logits = logits,
                     .head_stride = task.plan.token_count,
                     .token_count = piece.token_count(),
                     .first_position = piece.first_position()});
    column += piece.token_count();
  }
  kernels::ScoreSelect(task.exec, {.group_size = task.shape.group_size(),
                                   .rule = rule,
                                   .spans = spans,
                                   .positions = positions,
                                   .scratch = task.scratch.kernel});
}

void SelectByCodes(const HeadTask& task, GroupRule rule, std::span<uint32_t> positions) {
  std::vector<kernels::PqSpan> spans;
  spans.reserve(task.plan.pieces.size());
  for (const Piece& piece : task.plan.pieces) spans.push_back(SpanOf(piece, task.kv_head));
  kernels::PqSelect(task.exec, {.geometry = GeometryOf(task.index, task.shape.key_dim),
                                .group_size = task.shape.group_size(),
                                .rule = rule,
                                .spans = spans,
                                .tables = task.scratch.tables,
                                .positions = positions,
                                .scratch = task.scratch.kernel});
}

}  // namespace

size_t SelectScratchBytes(const kernels::Exec& exec, const LayerView& view,
                          const IndexDescriptor& index, std::span<const PositionRange> candidates) {
  return SelectParts(exec, view.shape, index, MakePlan(view, candidates)).total();
}

void SelectLayer(const kernels::Exec& exec, const LayerView& view, const SelectLayerArgs& args,
                 const ParallelFor& parallel, std::span<std::byte> scratch) {
  const LayerShape& shape = view.shape;
  if (args.select_count == 0) return;
  PQC_CHECK(args.positions.size() == size_t{shape.kv_heads} * args.select_count);
  const Plan plan = MakePlan(view, args.candidates);
  PQC_CHECK(args.select_count <= plan.token_count);
  const ScratchParts parts = SelectParts(exec, shape, args.index, plan);
  parallel.run(shape.kv_heads, [&](uint32_t kv_head, uint32_t worker) {
    const HeadTask task{.exec = exec,
                        .shape = shape,
                        .index = args.index,
                        .plan = plan,
                        .kv_head = kv_head,
                        .queries = HeadQueries(shape, args.queries, kv_head),
                        .scratch = Cut(scratch, parts, worker)};
    const std::span<uint32_t> positions =
        args.positions.subspan(size_t{kv_head} * args.select_count, args.select_count);
    if (args.index.kind == IndexKind::kPq) FillTables(task);
    if (TakesLogits(shape, args.index)) {
      SelectByLogits(task, args.rule, positions);
    } else {
      SelectByCodes(task, args.rule, positions);
    }
  });
}

size_t ScoreScratchBytes(const LayerView& view, const IndexDescriptor& index,
                         PositionRange tokens) {
  return TableParts(view.shape, index, MakePlan(view, {&tokens, 1})).total();
}

void ScoreLayer(const kernels::Exec& exec, const LayerView& view, const ScoreLayerArgs& args,
                const ParallelFor& parallel, std::span<std::byte> scratch) {
  const LayerShape& shape = view.shape;
  const size_t token_count = args.tokens.end - args.tokens.begin;
  PQC_CHECK(args.logits.size() == shape.query_heads * token_count);
  const Plan plan = MakePlan(view, {&args.tokens, 1});
  const ScratchParts parts = TableParts(shape, args.index, plan);
  parallel.run(shape.kv_heads, [&](uint32_t kv_head, uint32_t worker) {
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
    for (uint32_t head = first_head; head < first_head + shape.group_size(); ++head) {
      const std::span<const float> logits = args.logits.subspan(head * token_count, token_count);
      const float max = *std::max_element(logits.begin(), logits.end());
      double sum = 0;
      for (const float logit : logits) sum += std::exp(static_cast<double>(logit) - max);
      args.max[head] = max;
      args.sum_exp[head] = static_cast<float>(sum);
    }
  });
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
  return AlignUp(kernels::AttendScratchBytes(AttendShapeOf(view.shape)));
}

void AttendLayer(const kernels::Exec& exec, const LayerView& view, const AttendLayerArgs& args,
                 const ParallelFor& parallel, std::span<std::byte> scratch) {
  const LayerShape& shape = view.shape;
  const size_t scratch_bytes = AttendLayerScratchBytes(view);
  PQC_CHECK(parallel.worker_count * scratch_bytes <= scratch.size());
  const size_t select_count = args.positions.size() / shape.kv_heads;
  const uint32_t group = shape.group_size();
  parallel.run(shape.kv_heads, [&](uint32_t kv_head, uint32_t worker) {
    const std::vector<kernels::RowSpan> spans = RowSpans(view, kv_head);
    const size_t output_floats = size_t{group} * shape.value_dim;
    kernels::AttendRows(exec,
                        {.shape = AttendShapeOf(shape),
                         .scale = shape.scale,
                         .softcap = shape.softcap,
                         .queries = HeadQueries(shape, args.queries, kv_head),
                         .spans = spans,
                         .positions = args.positions.subspan(kv_head * select_count, select_count),
                         .output = args.output.subspan(kv_head * output_floats, output_floats),
                         .lse = args.lse.subspan(size_t{kv_head} * group, group),
                         .scratch = scratch.subspan(worker * scratch_bytes, scratch_bytes)});
  });
}

}  // namespace pqcached::kvstore

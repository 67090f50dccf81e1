#include "kvstore/read/layer_ops.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <functional>
#include <new>

#include "kernels/attend/attend.h"
#include "kernels/base/check.h"
#include "kernels/select/score_select.h"
#include "kvstore/read/indexes/index_types.h"

namespace pqcached::kvstore {
namespace {

// Calls take(piece, codebook) for every piece in order, with piece.codebook set.
template <typename Take>
SearchPlanSize ForEachPiece(const LayerView& view, std::span<const PositionRange> ranges,
                            Take take) {
  SearchPlanSize size;
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
      take(SearchPiece{.segment = &segment,
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

SearchPlanSize SizeOf(const LayerView& view, std::span<const PositionRange> ranges) {
  return ForEachPiece(view, ranges, [](const SearchPiece&, const CodebookHeader*) {});
}

// Sizes of the parts of one worker's scratch, in memory order.
struct ScratchParts {
  size_t piece_bytes = 0;     // the plan; only in the first worker's scratch
  size_t codebook_bytes = 0;  // the plan; only in the first worker's scratch
  size_t prepared_bytes = 0;
  size_t span_bytes = 0;       // the pieces in the form that the selection by logits reads
  size_t logit_bytes = 0;      // as above
  size_t work_bytes = 0;       // of index or kernel, one after the other
  size_t shortlist_bytes = 0;  // positions that the index proposes

  size_t total() const {
    return PaddedBytes(piece_bytes) + PaddedBytes(codebook_bytes) + PaddedBytes(span_bytes) +
           PaddedBytes(prepared_bytes) + PaddedBytes(logit_bytes) + PaddedBytes(work_bytes) +
           PaddedBytes(shortlist_bytes);
  }
};

// Returns whether the index only proposes candidates.
bool Reranks(const SelectLayerArgs& args) { return args.shortlist_count > args.select_count; }

ScratchParts PlanParts(const SearchPlanSize& plan, const SearchScratch& search) {
  return {.piece_bytes = plan.piece_count * sizeof(SearchPiece),
          .codebook_bytes = plan.codebook_count * sizeof(void*),  // pointers to headers
          .prepared_bytes = search.prepared_bytes,
          .work_bytes = search.work_bytes};
}

ScratchParts ScoreParts(const LayerShape& shape, const IndexDescriptor& index,
                        const SearchPlanSize& plan) {
  return PlanParts(plan, TypeOf(index).ScoreScratch(shape, index, plan));
}

// Returns the parts for the logits of all pieces, and for what reads them then.
ScratchParts LogitParts(const LayerShape& shape, const IndexDescriptor& index,
                        const SearchPlanSize& plan, size_t reader_bytes) {
  ScratchParts parts = ScoreParts(shape, index, plan);
  parts.span_bytes = plan.piece_count * sizeof(kernels::ScoreSpan);
  parts.logit_bytes = size_t{plan.token_count} * shape.group_size() * sizeof(float);
  parts.work_bytes = std::max(parts.work_bytes, reader_bytes);
  return parts;
}

ScratchParts SelectParts(const kernels::Exec& exec, const LayerShape& shape,
                         const IndexDescriptor& index, const SearchPlanSize& plan) {
  const IndexType& type = TypeOf(index);
  if (type.Selects(shape, index))
    return PlanParts(plan, type.SelectScratch(exec, shape, index, plan));
  return LogitParts(shape, index, plan,
                    kernels::ScoreSelectScratchBytes(shape.group_size(), plan.token_count));
}

ScratchParts CountParts(const LayerView& view, const IndexDescriptor& index,
                        std::span<const PositionRange> candidates) {
  const SearchPlanSize plan = SizeOf(view, candidates);
  return LogitParts(view.shape, index, plan, kernels::MassCountScratchBytes(plan.token_count));
}

ScratchParts PartsOf(const kernels::Exec& exec, const LayerView& view,
                     const SelectLayerArgs& args) {
  ScratchParts parts = SelectParts(exec, view.shape, args.index, SizeOf(view, args.candidates));
  if (!Reranks(args)) return parts;
  parts.shortlist_bytes = size_t{args.shortlist_count} * sizeof(uint32_t);
  // The index has done its work when re-ranking begins, which takes its place.
  parts.work_bytes = std::max(parts.work_bytes, RerankScratchBytes(view, args.shortlist_count));
  return parts;
}

struct Scratch {
  std::byte* pieces = nullptr;
  std::byte* codebooks = nullptr;
  std::span<std::byte> prepared;
  std::byte* spans = nullptr;
  std::span<float> logits;
  std::span<std::byte> work;
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
  cut.prepared = {take(parts.prepared_bytes), parts.prepared_bytes};
  cut.spans = take(parts.span_bytes);
  cut.logits = {reinterpret_cast<float*>(take(parts.logit_bytes)),
                parts.logit_bytes / sizeof(float)};
  cut.work = {take(parts.work_bytes), parts.work_bytes};
  cut.shortlist = {reinterpret_cast<uint32_t*>(take(parts.shortlist_bytes)),
                   parts.shortlist_bytes / sizeof(uint32_t)};
  return cut;
}

// Writes the plan into the first worker's scratch.
SearchPlan MakePlan(const LayerView& view, std::span<const PositionRange> ranges,
                    const Scratch& first) {
  SearchPiece* const pieces = reinterpret_cast<SearchPiece*>(first.pieces);
  const auto** const codebooks = reinterpret_cast<const CodebookHeader**>(first.codebooks);
  SearchPiece* next = pieces;
  const SearchPlanSize size =
      ForEachPiece(view, ranges, [&](const SearchPiece& piece, const CodebookHeader* codebook) {
        codebooks[piece.codebook] = codebook;
        new (next++) SearchPiece(piece);
      });
  return {.pieces = {pieces, size.piece_count},
          .codebooks = {codebooks, size.codebook_count},
          .token_count = size.token_count};
}

std::span<const float> HeadQueries(const LayerShape& shape, std::span<const float> queries,
                                   uint32_t kv_head) {
  const size_t floats = size_t{shape.group_size()} * shape.key_dim;
  return queries.subspan(kv_head * floats, floats);
}

// Returns the search of one kv head; `args` have the index and the queries of a layer.
template <class Args>
HeadSearch SearchOf(const kernels::Exec& exec, const LayerView& view, const Args& args,
                    const SearchPlan& plan, uint32_t kv_head, const Scratch& own) {
  return {.exec = exec,
          .shape = view.shape,
          .index = args.index,
          .plan = plan,
          .kv_head = view.stored_head(kv_head),
          .sharing_heads = view.sharing_heads,
          .sharing_head = kv_head % view.sharing_heads,
          .queries = HeadQueries(view.shape, args.queries, kv_head),
          .prepared = own.prepared,
          .work = own.work};
}

// Returns the part [G, k] of one kv head of logits [query_heads, k], which may be empty.
template <class Float>
std::span<Float> HeadLogits(const LayerShape& shape, std::span<Float> logits, uint32_t kv_head) {
  const size_t floats = logits.size() / shape.kv_heads;
  return logits.subspan(kv_head * floats, floats);
}

// Computes the logits of one piece, [G, stride].
void ScorePiece(const HeadSearch& search, const SearchPiece& piece, float* logits, size_t stride) {
  TypeOf(search.index).Score(search, piece, logits, stride);
  for (uint32_t head = 0; head < search.shape.group_size(); ++head)
    CapLogits(search.shape, {logits + head * stride, piece.token_count()});
}

// Computes the logits of all pieces, and returns where they are.
std::span<const kernels::ScoreSpan> ScorePieces(const HeadSearch& search, const Scratch& scratch) {
  auto* const spans = reinterpret_cast<kernels::ScoreSpan*>(scratch.spans);
  size_t count = 0;
  size_t column = 0;
  for (const SearchPiece& piece : search.plan.pieces) {
    float* logits = scratch.logits.data() + column;
    ScorePiece(search, piece, logits, search.plan.token_count);
    new (spans + count++) kernels::ScoreSpan{.logits = logits,
                                             .head_stride = search.plan.token_count,
                                             .token_count = piece.token_count(),
                                             .first_position = piece.first_position()};
    column += piece.token_count();
  }
  return {spans, count};
}

void SelectByLogits(const HeadSearch& search, const Scratch& scratch, GroupRule rule,
                    std::span<uint32_t> positions) {
  kernels::ScoreSelect(search.exec, {.group_size = search.shape.group_size(),
                                     .rule = rule,
                                     .spans = ScorePieces(search, scratch),
                                     .positions = positions,
                                     .scratch = scratch.work});
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
  const IndexType& type = TypeOf(args.index);
  const ScratchParts parts = PartsOf(exec, view, args);
  const SearchPlan plan = MakePlan(view, args.candidates, Cut(scratch, parts, 0));
  PQC_CHECK(std::max(args.select_count, args.shortlist_count) <= plan.token_count);
  const auto select_head = [&](uint32_t kv_head, uint32_t worker) {
    const Scratch own = Cut(scratch, parts, worker);
    const HeadSearch search = SearchOf(exec, view, args, plan, kv_head, own);
    const std::span<uint32_t> positions =
        args.positions.subspan(size_t{kv_head} * args.select_count, args.select_count);
    const std::span<uint32_t> proposed = Reranks(args) ? own.shortlist : positions;
    type.Prepare(search);
    if (type.Selects(shape, args.index)) {
      type.Select(search, args.rule, proposed);
    } else {
      SelectByLogits(search, own, args.rule, proposed);
    }
    if (!Reranks(args)) return;
    Rerank(exec, view,
           {.kv_head = kv_head,
            .rule = args.rule,
            .queries = search.queries,
            .shortlist = own.shortlist,
            .positions = positions,
            .logits = HeadLogits(shape, args.logits, kv_head)},
           own.work);
  };
  parallel.run(shape.kv_heads, std::cref(select_head));  // a reference, because a copy allocates
}

size_t CountScratchBytes(const LayerView& view, const IndexDescriptor& index,
                         std::span<const PositionRange> candidates) {
  return CountParts(view, index, candidates).total();
}

uint32_t CountLayer(const kernels::Exec& exec, const LayerView& view, const CountLayerArgs& args,
                    const ParallelFor& parallel, std::span<std::byte> scratch) {
  const LayerShape& shape = view.shape;
  const uint32_t group = shape.group_size();
  PQC_CHECK(args.own.size() == shape.query_heads);
  const ScratchParts parts = CountParts(view, args.index, args.candidates);
  const SearchPlan plan = MakePlan(view, args.candidates, Cut(scratch, parts, 0));
  std::atomic<uint32_t> most = 0;
  const auto count_head = [&](uint32_t kv_head, uint32_t worker) {
    const Scratch own = Cut(scratch, parts, worker);
    const HeadSearch search = SearchOf(exec, view, args, plan, kv_head, own);
    TypeOf(args.index).Prepare(search);
    const std::span<const kernels::ScoreSpan> spans = ScorePieces(search, own);
    const uint32_t count =
        kernels::CountForMass(exec, {.group_size = group,
                                     .rule = args.rule,
                                     .spans = spans,
                                     .own = args.own.subspan(size_t{kv_head} * group, group),
                                     .mass = args.mass,
                                     .scratch = own.work});
    uint32_t before = most.load(std::memory_order_relaxed);
    while (before < count && !most.compare_exchange_weak(before, count)) {
    }
  };
  parallel.run(shape.kv_heads, std::cref(count_head));
  return most.load();
}

size_t ScoreScratchBytes(const LayerView& view, const IndexDescriptor& index,
                         PositionRange tokens) {
  return ScoreParts(view.shape, index, SizeOf(view, {&tokens, 1})).total();
}

void ScoreLayer(const kernels::Exec& exec, const LayerView& view, const ScoreLayerArgs& args,
                const ParallelFor& parallel, std::span<std::byte> scratch) {
  const LayerShape& shape = view.shape;
  const size_t token_count = args.tokens.end - args.tokens.begin;
  PQC_CHECK(args.logits.size() == shape.query_heads * token_count);
  const ScratchParts parts = ScoreParts(shape, args.index, SizeOf(view, {&args.tokens, 1}));
  const SearchPlan plan = MakePlan(view, {&args.tokens, 1}, Cut(scratch, parts, 0));
  const auto score_head = [&](uint32_t kv_head, uint32_t worker) {
    const Scratch own = Cut(scratch, parts, worker);
    const HeadSearch search = SearchOf(exec, view, args, plan, kv_head, own);
    TypeOf(args.index).Prepare(search);
    const uint32_t first_head = kv_head * shape.group_size();
    float* column = args.logits.data() + first_head * token_count;
    for (const SearchPiece& piece : plan.pieces) {
      ScorePiece(search, piece, column, token_count);
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

kernels::AttendShape AttendShapeOf(const LayerShape& shape) {
  return {.dtype = shape.dtype,
          .key_dim = shape.key_dim,
          .value_dim = shape.value_dim,
          .row_stride_bytes = shape.row_bytes,
          .group_size = shape.group_size(),
          .query_length = 1};
}

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
  const bool scored = args.queries.empty() || !args.logits.empty();
  const auto attend_head = [&](uint32_t kv_head, uint32_t worker) {
    const std::span<const uint32_t> positions =
        args.lists.empty() ? args.positions.subspan(kv_head * select_count, select_count)
                           : args.lists[kv_head];
    size_t before = kv_head * select_count;  // positions of the kv heads before this one
    for (const auto& list : args.lists.first(args.lists.empty() ? 0 : kv_head))
      before += list.size();
    const std::span<std::byte> own = scratch.subspan(worker * scratch_bytes, scratch_bytes);
    const size_t output_floats = size_t{group} * shape.value_dim;
    const kernels::AttendArgs rows{
        .shape = AttendShapeOf(shape),
        .scale = shape.scale,
        .softcap = shape.softcap,
        .queries = scored ? std::span<const float>() : HeadQueries(shape, args.queries, kv_head),
        .spans = FillRowSpans(view, kv_head, own.first(span_bytes)),
        .positions = positions,
        .output = args.output.subspan(kv_head * output_floats, output_floats),
        .lse = args.lse.subspan(size_t{kv_head} * group, group),
        .scratch = own.subspan(span_bytes),
        .logits = scored ? args.logits.subspan(group * before, group * positions.size())
                         : std::span<const float>()};
    if (scored) {
      kernels::AttendScored(exec, rows);
    } else {
      kernels::AttendRows(exec, rows);
    }
  };
  parallel.run(shape.kv_heads, std::cref(attend_head));
}

}  // namespace pqcached::kvstore

// Exact re-ranking of what an index proposes.
#include <algorithm>

#include "kernels/base/check.h"
#include "kernels/select/exact/exact_score.h"
#include "kernels/select/score_select.h"
#include "kvstore/read/layer_ops.h"

namespace pqcached::kvstore {
namespace {

// Sizes of the parts of the scratch, in memory order.
struct RerankParts {
  size_t logit_bytes = 0;     // [G, shortlist]
  size_t row_span_bytes = 0;  // the rows of the kv head
  size_t kernel_bytes = 0;

  size_t total() const {
    return PaddedBytes(logit_bytes) + PaddedBytes(row_span_bytes) + PaddedBytes(kernel_bytes);
  }
};

RerankParts RerankPartsOf(const LayerView& view, uint32_t shortlist_count) {
  const uint32_t group = view.shape.group_size();
  return {.logit_bytes = size_t{shortlist_count} * group * sizeof(float),
          .row_span_bytes = view.segments.size() * sizeof(kernels::RowSpan),
          .kernel_bytes = std::max(kernels::ExactScoreScratchBytes(group, view.shape.key_dim),
                                   kernels::ScoreSelectScratchBytes(group, shortlist_count))};
}

struct RerankScratch {
  std::span<float> logits;
  std::span<std::byte> row_spans;
  std::span<std::byte> kernel;
};

RerankScratch Cut(std::span<std::byte> scratch, const RerankParts& parts) {
  PQC_CHECK(parts.total() <= scratch.size());
  const auto take = [&scratch](size_t bytes) {
    const std::span<std::byte> part = scratch.first(bytes);
    scratch = scratch.subspan(PaddedBytes(bytes));
    return part;
  };
  const std::span<std::byte> logits = take(parts.logit_bytes);
  return {.logits = {reinterpret_cast<float*>(logits.data()), logits.size() / sizeof(float)},
          .row_spans = take(parts.row_span_bytes),
          .kernel = take(parts.kernel_bytes)};
}

// Computes the exact logits of the shortlist, [G, shortlist].
void ScoreShortlist(const kernels::Exec& exec, const LayerView& view, const RerankArgs& args,
                    const RerankScratch& scratch) {
  const LayerShape& shape = view.shape;
  kernels::ExactScoresAt(exec, {.dtype = shape.dtype,
                                .key_dim = shape.key_dim,
                                .row_stride_bytes = shape.row_bytes,
                                .group_size = shape.group_size(),
                                .token_count = static_cast<uint32_t>(args.shortlist.size()),
                                .scale = shape.scale,
                                .queries = args.queries,
                                .spans = FillRowSpans(view, args.kv_head, scratch.row_spans),
                                .positions = args.shortlist,
                                .score_stride = args.shortlist.size(),
                                .scores = scratch.logits,
                                .scratch = scratch.kernel});
  CapLogits(shape, scratch.logits);
}

// Copies the logits of the selected tokens, whose positions are still places in the shortlist.
void TakeLogits(const RerankArgs& args, std::span<const float> of_shortlist) {
  const size_t count = args.positions.size();
  PQC_CHECK(args.logits.size() % count == 0);
  for (size_t head = 0; head < args.logits.size() / count; ++head) {
    const float* from = of_shortlist.data() + head * args.shortlist.size();
    float* to = args.logits.data() + head * count;
    for (size_t i = 0; i < count; ++i) to[i] = from[args.positions[i]];
  }
}

}  // namespace

size_t RerankScratchBytes(const LayerView& view, uint32_t shortlist_count) {
  return RerankPartsOf(view, shortlist_count).total();
}

void Rerank(const kernels::Exec& exec, const LayerView& view, const RerankArgs& args,
            std::span<std::byte> scratch) {
  const auto count = static_cast<uint32_t>(args.shortlist.size());
  const RerankScratch parts = Cut(scratch, RerankPartsOf(view, count));
  ScoreShortlist(exec, view, args, parts);
  const kernels::ScoreSpan all{
      .logits = parts.logits.data(), .head_stride = count, .token_count = count};
  kernels::ScoreSelect(exec, {.group_size = view.shape.group_size(),
                              .rule = args.rule,
                              .spans = {&all, 1},
                              .positions = args.positions,
                              .scratch = parts.kernel});
  if (!args.logits.empty()) TakeLogits(args, parts.logits);
  for (uint32_t& position : args.positions) position = args.shortlist[position];
}

}  // namespace pqcached::kvstore

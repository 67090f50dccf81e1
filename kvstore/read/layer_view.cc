#include "kvstore/read/layer_view.h"

#include <cmath>
#include <new>

namespace pqcached::kvstore {

ParallelFor SerialFor() {
  return ParallelFor{.worker_count = 1,
                     .run = [](uint32_t task_count, const ParallelFor::Body& body) {
                       for (uint32_t task = 0; task < task_count; ++task) body(task, 0);
                     }};
}

std::vector<kernels::RowSpan> RowSpans(const LayerView& view, uint32_t kv_head) {
  std::vector<kernels::RowSpan> spans(view.segments.size());
  spans.resize(FillRowSpans(view, kv_head, std::as_writable_bytes(std::span(spans))).size());
  return spans;
}

std::span<const kernels::RowSpan> FillRowSpans(const LayerView& view, uint32_t kv_head,
                                               std::span<std::byte> memory) {
  auto* const spans = reinterpret_cast<kernels::RowSpan*>(memory.data());
  size_t count = 0;
  for (const SegmentView& segment : view.segments) {
    if (segment.token_count == 0) continue;
    new (spans + count++) kernels::RowSpan{.rows = segment.rows[view.stored_head(kv_head)],
                                           .token_count = segment.token_count,
                                           .first_position = segment.first_position};
  }
  return {spans, count};
}

void CapLogits(const LayerShape& shape, std::span<float> logits) {
  if (shape.softcap <= 0) return;
  for (float& logit : logits) logit = shape.softcap * std::tanh(logit / shape.softcap);
}

}  // namespace pqcached::kvstore

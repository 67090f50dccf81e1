#include "kvstore/read/layer_view.h"

namespace pqcached::kvstore {

ParallelFor SerialFor() {
  return ParallelFor{.worker_count = 1,
                     .run = [](uint32_t task_count, const ParallelFor::Body& body) {
                       for (uint32_t task = 0; task < task_count; ++task) body(task, 0);
                     }};
}

std::vector<kernels::RowSpan> RowSpans(const LayerView& view, uint32_t kv_head) {
  std::vector<kernels::RowSpan> spans;
  spans.reserve(view.segments.size());
  for (const SegmentView& segment : view.segments) {
    if (segment.token_count == 0) continue;
    spans.push_back({.rows = segment.rows[kv_head],
                     .token_count = segment.token_count,
                     .first_position = segment.first_position});
  }
  return spans;
}

}  // namespace pqcached::kvstore

// Selection of pages on a GPU.
#include <algorithm>

#include "client/base/error.h"
#include "client/gpu/gpu.h"
#include "kernels/base/status_macros.h"

namespace pqcached::client {

void DescribeOthers(GpuState& gpu, const pqc_step& step) {
  gpu.excluded.clear();
  if (!step.has_selection) return;
  for (const kvstore::PositionRange& range : step.selection.excluded) {
    gpu.excluded.push_back({range.begin, range.end});
  }
  for (size_t i = 0; i < step.items.size(); ++i) {
    const StepItem& item = step.items[i];
    const kvstore::PageEnds ends =
        kvstore::EndsOf(step.selection, {item.query_position, item.query_length});
    gpu.sequences[i].sink_end = ends.sink.end;
    gpu.sequences[i].window = {ends.window.begin, ends.window.end};
  }
}

pqc_status GpuState::SelectPages(const LayerCall& call) {
  uint32_t ordinal = 0;
  RETURN_IF_ERROR(FindGpuLayer(*this, call.layer, &ordinal));
  const PageCall& pages = *call.pages;
  const gpu::Outcome launched =
      steps->SelectPages(ordinal, DeviceQueriesOf(call.queries), call.step->selection.group_rule,
                         {.page_tokens = pages.terms.page_tokens,
                          .heads = pages.terms.heads,
                          .with_sink = pages.terms.with_sink,
                          .with_window = pages.terms.with_window,
                          .lists = pages.lists,
                          .capacity = pages.capacity,
                          .lengths = pages.lengths});
  return Report(launched, "gpu");
}

}  // namespace pqcached::client

// The calls of Reader that give rows: copies, and visits in place.
#include <algorithm>
#include <array>
#include <functional>
#include <string>

#include "kernels/base/check.h"
#include "kernels/base/status_macros.h"
#include "kernels/rows/gather.h"
#include "kvstore/read/reader.h"
#include "kvstore/read/resolve.h"

namespace pqcached::kvstore {
namespace {

// Tokens of a task that visits rows.
constexpr uint32_t kTaskTokens = 256;

// Copies a part of the rows [begin, end) of one kv head. Returns the end of the output.
std::byte* CopyRun(const LayerView& view, uint32_t kv_head, TokenRange tokens,
                   const PartBytes& part, std::byte* out) {
  const size_t row_bytes = view.shape.row_bytes;
  for (const SegmentView& segment : view.segments) {
    const uint64_t first = segment.first_position;
    const uint64_t begin = std::max(tokens.begin, first);
    const uint64_t end = std::min(tokens.end, first + segment.token_count);
    if (begin >= end) continue;
    const std::byte* row = segment.rows[kv_head] + (begin - first) * row_bytes + part.begin;
    if (part.size == row_bytes) {
      out = std::copy_n(row, (end - begin) * row_bytes, out);
      continue;
    }
    for (uint64_t token = begin; token < end; ++token, row += row_bytes) {
      out = std::copy_n(row, part.size, out);
    }
  }
  return out;
}

// Calls `visit` for the rows [begin, end), once for each segment.
void VisitRuns(const LayerView& view, uint32_t begin, uint32_t end,
               const std::function<void(const RowRun& run)>& visit) {
  std::array<const std::byte*, kMaxKvHeads> rows;
  for (const SegmentView& segment : view.segments) {
    const uint32_t first = std::max(begin, segment.first_position);
    const uint32_t last = std::min(end, segment.first_position + segment.token_count);
    if (first >= last) continue;
    const size_t offset = size_t{first - segment.first_position} * view.shape.row_bytes;
    for (uint32_t kv_head = 0; kv_head < view.shape.kv_heads; ++kv_head) {
      rows[kv_head] = segment.rows[kv_head] + offset;
    }
    visit({.first_position = first,
           .token_count = last - first,
           .rows = {rows.data(), view.shape.kv_heads}});
  }
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

Refusal CheckPart(const LayerShape& shape, uint32_t layer, RowPart part) {
  if (part != RowPart::kKey || shape.has_keys()) return {};
  return {.code = StatusCode::kFailedPrecondition,
          .field = "part",
          .text = "layer " + std::to_string(layer) + " stores values only"};
}

}  // namespace

Refusal Reader::FetchBlocks(uint32_t layer, TokenRange tokens, RowPart part,
                            std::span<std::byte> out) {
  LayerView view;
  RETURN_IF_ERROR(source_.Open({.layer = layer}, &view));
  RETURN_IF_ERROR(CheckTokens(tokens, view.token_count()));
  RETURN_IF_ERROR(CheckPart(view.shape, layer, part));
  const PartBytes bytes = BytesOfPart(view.shape, part);
  PQC_CHECK(out.size() >= view.shape.kv_heads * (tokens.end - tokens.begin) * bytes.size);
  std::byte* to = out.data();
  for (uint32_t kv_head = 0; kv_head < view.shape.kv_heads; ++kv_head) {
    to = CopyRun(view, kv_head, tokens, bytes, to);
  }
  return {};
}

Refusal Reader::CheckStored(uint32_t layer, TokenRange tokens) {
  LayerView view;
  RETURN_IF_ERROR(source_.Open({.layer = layer}, &view));
  return CheckTokens(tokens, view.token_count());
}

Refusal Reader::VisitRows(uint32_t layer, TokenRange tokens,
                          const std::function<void(const RowRun& run)>& visit) {
  LayerView view;
  RETURN_IF_ERROR(source_.Open({.layer = layer}, &view));
  RETURN_IF_ERROR(CheckTokens(tokens, view.token_count()));
  const auto begin = static_cast<uint32_t>(tokens.begin), end = static_cast<uint32_t>(tokens.end);
  const uint32_t task_count = (end - begin + kTaskTokens - 1) / kTaskTokens;
  const ParallelFor::Body body = [&](uint32_t task, uint32_t) {
    const uint32_t first = begin + task * kTaskTokens;
    VisitRuns(view, first, std::min(end, first + kTaskTokens), visit);
  };
  ThreadsFor(uint64_t{end - begin} * view.shape.kv_heads).run(task_count, body);
  return {};
}

Refusal Reader::FetchTokens(uint32_t layer, std::span<const uint32_t> positions, RowPart part,
                            std::span<std::byte> out) {
  LayerView view;
  RETURN_IF_ERROR(source_.Open({.layer = layer}, &view));
  RETURN_IF_ERROR(CheckPositions(view, positions, /*ascending=*/false));
  RETURN_IF_ERROR(CheckPart(view.shape, layer, part));
  const PartBytes bytes = BytesOfPart(view.shape, part);
  const size_t per_head = positions.size() / view.shape.kv_heads;
  PQC_CHECK(out.size() >= positions.size() * bytes.size);
  for (uint32_t kv_head = 0; kv_head < view.shape.kv_heads; ++kv_head) {
    GatherHead(exec_, view, kv_head, positions.subspan(kv_head * per_head, per_head), bytes,
               out.subspan(kv_head * per_head * bytes.size, per_head * bytes.size));
  }
  return {};
}

}  // namespace pqcached::kvstore

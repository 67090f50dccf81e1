// Decode calls on a GPU: which rows of sink and window the device finds in the pool, and which the
// host brings, because they are not stored yet.
#include <algorithm>

#include "client/base/error.h"
#include "client/gpu/gpu.h"
#include "client/step/decode.h"
#include "client/step/read_backend.h"
#include "kernels/base/status_macros.h"

namespace pqcached::client {
namespace {

using LongLong = unsigned long long;  // for %llu

// Sink and window of an item. An item without tokens between them has no sink, and a window of all
// its tokens.
gpu::StepOwn OwnTokensOf(const pqc_step& step, const StepItem& item) {
  const auto position = static_cast<uint32_t>(item.query_position);
  if (!HasCandidates(step, item)) return {.query_position = position};
  return {.query_position = position,
          .sink_end = step.selection.sink_tokens,
          .window_begin = position + 1 - step.selection.window_tokens};
}

}  // namespace

bool HasCandidates(const pqc_step& step, const StepItem& item) {
  const uint64_t own = uint64_t{step.selection.sink_tokens} + step.selection.window_tokens;
  return own < item.query_position + 1;
}

pqc_status CheckDecodingStep(const GpuState& gpu, const pqc_step& step) {
  for (size_t i = 0; i < step.items.size(); ++i) {
    const gpu::StepOwn own = OwnTokensOf(step, step.items[i]);
    const uint64_t tokens =
        uint64_t{own.sink_end} + own.query_position - own.window_begin + step.items[i].query_length;
    if (tokens <= gpu.selected_capacity) continue;
    return Fail(PQC_INVALID_ARGUMENT, "options.selection.window_tokens",
                "sink and window of items[%zu] have %llu tokens, must be at most "
                "selected_capacity, %u, with PQC_STEP_DECODES",
                i, LongLong{tokens}, gpu.selected_capacity);
  }
  const uint64_t others = step.items.front().query_length - 1;
  for (size_t i = 0; i < gpu.layers.size(); ++i) {
    if (gpu.windows[i] + others <= gpu.selected_capacity) continue;
    return Fail(PQC_INVALID_ARGUMENT, "options.flags",
                "PQC_STEP_DECODES: layer %u has a window of %u tokens, with the query tokens it "
                "must be at most selected_capacity, %u",
                gpu.layers[i], gpu.windows[i], gpu.selected_capacity);
  }
  return PQC_OK;
}

pqc_status TakeRecentRows(pqc_step& step, size_t number) {
  const StepItem& item = step.items[number];
  const uint64_t recent = std::min<uint64_t>(item.query_position, gpu::kRecentCapacity);
  const uint64_t floor = std::max<uint64_t>(RowEnd(step, item), item.query_position - recent);
  RETURN_IF_ERROR(WaitForTokens(step, number, static_cast<uint32_t>(floor)));
  const pqc_status status = CopyUnstoredOf(step, number, floor);
  if (status != PQC_OK) return PrefixItem(number, status);
  // Rows that are not in the queue any more are visible soon.
  const uint64_t begin = step.decode.unstored[number].begin;
  return WaitForTokens(step, number, static_cast<uint32_t>(begin));
}

void DescribeOwnRows(GpuState& gpu, const pqc_step& step) {
  for (size_t i = 0; i < step.items.size(); ++i) {
    const DecodeState::Unstored& unstored = step.decode.unstored[i];
    gpu::StepOwn& own = gpu.sequences[i].own;
    own = OwnTokensOf(step, step.items[i]);
    own.stored_end = static_cast<uint32_t>(unstored.begin);
    own.recent = step.decode.unstored_rows.data() + unstored.tables_begin;
  }
}

const std::byte* GpuState::DecodedRows(uint32_t layer, uint64_t* token_room) const {
  *token_room = uint64_t{sequence_capacity} * query_length;
  const auto found = std::lower_bound(layers.begin(), layers.end(), layer);
  const auto ordinal = static_cast<uint32_t>(found - layers.begin());
  return static_cast<const std::byte*>(steps->Kept(ordinal));
}

}  // namespace pqcached::client

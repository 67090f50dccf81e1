// Attention of decode calls to sink and window, and its merge with the other partial results.
#include <algorithm>
#include <atomic>
#include <functional>
#include <new>

#include "client/base/error.h"
#include "client/step/decode.h"
#include "kernels/attend/attend_range.h"
#include "kernels/attend/merge.h"
#include "kernels/base/exec.h"
#include "kernels/base/finite.h"

namespace pqcached::client {
namespace {

using kernels::RowSpan;
using kvstore::PositionRange;

// Fewer rows than this, over all items and kv heads, are read before other threads would wake up.
constexpr uint64_t kParallelRows = 512;
constexpr uint32_t kNoTask = ~0u;

size_t Aligned(size_t bytes) { return (bytes + 63) / 64 * 64; }

// Adds the pieces of [begin, end) outside the excluded ranges.
void AddWithout(const kvstore::ExcludedRanges& excluded, uint32_t begin, uint32_t end,
                std::vector<PositionRange>* ranges) {
  for (const PositionRange& gap : excluded) {
    if (gap.end <= begin) continue;
    if (gap.begin >= end) break;
    if (gap.begin > begin) ranges->push_back({begin, gap.begin});
    begin = gap.end;
  }
  if (begin < end) ranges->push_back({begin, end});
}

// Adds the sink and the window of an item. Returns whether there are tokens between them.
bool AddSinkAndWindow(const kvstore::Selection& terms, const StepItem& item, DecodeState* state) {
  const auto context = static_cast<uint32_t>(item.query_position) + 1;
  const uint32_t end = context - 1 + item.query_length;
  const uint32_t sink_end = std::min(terms.sink_tokens, context);
  const uint32_t window_begin =
      std::max(sink_end, context - std::min(terms.window_tokens, context));
  const bool selects = window_begin > sink_end;
  const size_t begin = state->ranges.size();
  if (selects) AddWithout(terms.excluded, 0, sink_end, &state->ranges);
  AddWithout(terms.excluded, selects ? window_begin : 0, end, &state->ranges);
  state->parts.push_back({0, item.query_length, begin, state->ranges.size()});
  return selects;
}

// Adds the layer's own window of each query token of an item.
void AddWindows(const LayerCall& call, const StepItem& item, DecodeState* state) {
  for (uint32_t token = 0; token < item.query_length; ++token) {
    const auto end = static_cast<uint32_t>(item.query_position) + token + 1;
    const size_t begin = state->ranges.size();
    AddWithout(call.given->excluded, end - std::min(call.window_tokens, end), end, &state->ranges);
    state->parts.push_back({token, 1, begin, state->ranges.size()});
  }
}

// One call: a task is one kv head of one item.
class OwnAttention {
 public:
  OwnAttention(const LayerCall& call, std::span<const OpenedLayer> views, uint32_t workers)
      : call_(call), state_(call.step->decode), views_(views), shape_(call.shape) {
    size_t spans = 0;
    uint32_t length = 1;
    for (size_t i = 0; i < items().size(); ++i) {
      const size_t segments = views.empty() ? 0 : views[i].view.segments.size();
      // A range has rows in stored segments, in rows that are not stored, and in those of the step.
      for (const DecodeState::Part& part : PartsOf(i)) {
        spans = std::max(spans, segments + 3 * (part.ranges_end - part.ranges_begin));
        length = std::max(length, part.token_count);
      }
    }
    for (const auto& [number, other] : call.step->cache->stored_layers) {
      if (number == call.layer) break;
      table_bytes_before_ += size_t{other.kv_heads} * other.row_bytes;
    }
    const size_t heads = size_t{length} * shape_.group_size();
    span_bytes_ = Aligned(spans * sizeof(RowSpan));
    query_bytes_ = Aligned(heads * shape_.key_dim * sizeof(float));
    output_bytes_ = Aligned(heads * shape_.value_dim * sizeof(float));
    lse_bytes_ = Aligned(heads * sizeof(float));
    kernel_bytes_ = Aligned(kernels::AttendRangeScratchBytes(KernelShape(length)));
    worker_bytes_ = span_bytes_ + query_bytes_ + output_bytes_ + lse_bytes_ + kernel_bytes_;
    scratch_ = (*call.step->items[0].scratch)->Bytes(workers * worker_bytes_).data();
  }

  void Run(uint32_t task, uint32_t worker) {
    const StepItem& item = items()[task / shape_.kv_heads];
    const uint32_t kv_head = task % shape_.kv_heads;
    std::byte* const own = scratch_ + worker * worker_bytes_;
    auto* const queries = reinterpret_cast<float*>(own + span_bytes_);
    auto* const output = reinterpret_cast<float*>(own + span_bytes_ + query_bytes_);
    auto* const lse = reinterpret_cast<float*>(own + span_bytes_ + query_bytes_ + output_bytes_);
    for (const DecodeState::Part& part : PartsOf(IndexOf(item))) {
      const size_t heads = size_t{part.token_count} * shape_.group_size();
      if (!GatherQueries(item, part, kv_head, queries)) Blame(task);
      kernels::AttendRange(
          exec(), {.shape = KernelShape(part.token_count),
                   .scale = shape_.scale,
                   .softcap = shape_.softcap,
                   .query_position = static_cast<uint32_t>(item.query_position) + part.token,
                   .queries = {queries, heads * shape_.key_dim},
                   .spans = SpansOf(item, part, kv_head, own),
                   .output = {output, heads * shape_.value_dim},
                   .lse = {lse, heads},
                   .scratch = {own + worker_bytes_ - kernel_bytes_, kernel_bytes_}});
      MergeAndStore(item, part, kv_head, output, lse);
    }
  }

  // Returns the first task whose queries are not finite, or kNoTask.
  uint32_t bad_task() const { return bad_task_.load(std::memory_order_relaxed); }

 private:
  const kernels::Exec& exec() const { return call_.step->cache->client->exec; }
  const std::vector<StepItem>& items() const { return call_.step->items; }
  size_t IndexOf(const StepItem& item) const { return static_cast<size_t>(&item - items().data()); }

  std::span<const DecodeState::Part> PartsOf(size_t item) const {
    const DecodeState::Own& own = state_.own[item];
    return std::span(state_.parts).subspan(own.parts_begin, own.parts_end - own.parts_begin);
  }

  kernels::AttendRangeShape KernelShape(uint32_t tokens) const {
    return {.dtype = shape_.dtype,
            .key_dim = shape_.key_dim,
            .value_dim = shape_.value_dim,
            .row_stride_bytes = shape_.row_bytes,
            .group_size = shape_.group_size(),
            .token_count = tokens};
  }

  void Blame(uint32_t task) {
    uint32_t first = bad_task_.load(std::memory_order_relaxed);
    while (task < first && !bad_task_.compare_exchange_weak(first, task)) {
    }
  }

  // Copies the part's queries of one kv head, [token_count, group_size, key_dim]. Returns whether
  // they are finite.
  bool GatherQueries(const StepItem& item, const DecodeState::Part& part, uint32_t kv_head,
                     float* to) const {
    const kvstore::LayerQuery query = LayerQueryOf(QueryOf(call_, item));
    const uint32_t group = shape_.group_size();
    float* next = to;
    for (uint32_t token = part.token; token < part.token + part.token_count; ++token) {
      for (uint32_t head = kv_head * group; head < (kv_head + 1) * group; ++head) {
        query.Copy(token, head, shape_.key_dim, next);
        next += shape_.key_dim;
      }
    }
    return kernels::AllFinite({to, next});
  }

  std::span<const RowSpan> SpansOf(const StepItem& item, const DecodeState::Part& part,
                                   uint32_t kv_head, std::byte* memory) const {
    const size_t index = IndexOf(item);
    const DecodeState::Unstored& unstored = state_.unstored[index];
    const auto stored_end = static_cast<uint32_t>(unstored.begin);
    const auto first = static_cast<uint32_t>(item.query_position);
    // Tables begin with the first token that is not stored, and with the first of the step.
    const uint64_t unstored_count = first - stored_end;
    const std::byte* const earlier = state_.unstored_rows.data() + unstored.tables_begin +
                                     unstored_count * table_bytes_before_ +
                                     kv_head * unstored_count * shape_.row_bytes;
    const std::byte* const present =
        state_.rows.data() + state_.layers.back().table_begin +
        (kv_head * call_.step->query_tokens + item.query_begin) * shape_.row_bytes;
    auto* const spans = reinterpret_cast<RowSpan*>(memory);
    size_t count = 0;
    const auto add = [&](const std::byte* rows, uint32_t rows_begin, uint32_t begin, uint32_t end) {
      if (begin >= end) return;
      new (spans + count++) RowSpan{.rows = rows + size_t{begin - rows_begin} * shape_.row_bytes,
                                    .token_count = end - begin,
                                    .first_position = begin};
    };
    for (size_t i = part.ranges_begin; i < part.ranges_end; ++i) {
      const PositionRange range = state_.ranges[i];
      if (!views_.empty()) {
        for (const kvstore::SegmentView& segment : views_[index].view.segments) {
          const uint32_t end = segment.first_position + segment.token_count;
          if (segment.first_position >= range.end) break;
          add(segment.rows[kv_head], segment.first_position,
              std::max(range.begin, segment.first_position),
              std::min({range.end, end, stored_end}));
        }
      }
      add(earlier, stored_end, std::max(range.begin, stored_end), std::min(range.end, first));
      add(present, first, std::max(range.begin, first), range.end);
    }
    return {spans, count};
  }

  // Merges the result of one kv head with that over the other tokens, token by token.
  void MergeAndStore(const StepItem& item, const DecodeState::Part& part, uint32_t kv_head,
                     float* output, float* lse) const {
    const uint32_t group = shape_.group_size(), dim = shape_.value_dim;
    const kvstore::AttentionOut out = OutOf(call_, item);
    for (uint32_t token = part.token; token < part.token + part.token_count; ++token) {
      const size_t row = (item.query_begin + token) * shape_.query_heads + size_t{kv_head} * group;
      const kernels::Partial partials[] = {{output, lse},
                                           {&state_.output[row * dim], &state_.lse[row]}};
      kernels::MergePartials(exec(), {.query_count = group,
                                      .value_dim = dim,
                                      .partials = partials,
                                      .output = {output, size_t{group} * dim},
                                      .lse = {lse, group}});
      for (uint32_t head = 0; head < group; ++head) {
        out.Store(token, kv_head * group + head, output + size_t{head} * dim, dim, lse[head]);
      }
      output += size_t{group} * dim;
      lse += group;
    }
  }

  const LayerCall& call_;
  const DecodeState& state_;
  const std::span<const OpenedLayer> views_;
  const LayerShape& shape_;
  size_t table_bytes_before_ = 0;  // per token, of the stored layers before this one
  size_t span_bytes_, query_bytes_, output_bytes_, lse_bytes_, kernel_bytes_, worker_bytes_;
  std::byte* scratch_;
  std::atomic<uint32_t> bad_task_ = kNoTask;
};

}  // namespace

void FindOwnRanges(const LayerCall& call, DecodeState* state) {
  state->own.assign(call.step->items.size(), {});
  state->parts.clear();
  state->ranges.clear();
  for (size_t i = 0; i < call.step->items.size(); ++i) {
    DecodeState::Own& own = state->own[i];
    own.parts_begin = state->parts.size();
    if (call.shape.kind == kvstore::LayerKind::kWindow) {
      AddWindows(call, call.step->items[i], state);
    } else {
      own.selects = AddSinkAndWindow(*call.selection, call.step->items[i], state);
    }
    own.parts_end = state->parts.size();
  }
}

pqc_status AttendToOwnRows(const LayerCall& call, std::span<const OpenedLayer> views,
                           const kvstore::ParallelFor& threads) {
  const DecodeState& state = call.step->decode;
  static const kvstore::ParallelFor serial = kvstore::SerialFor();
  uint64_t rows = 0;
  for (const PositionRange& range : state.ranges) rows += range.end - range.begin;
  const bool in_parallel = rows * call.shape.kv_heads >= kParallelRows;
  const kvstore::ParallelFor& parallel = in_parallel ? threads : serial;
  OwnAttention attention(call, views, parallel.worker_count);
  const auto run = [&](uint32_t task, uint32_t worker) { attention.Run(task, worker); };
  const auto tasks = static_cast<uint32_t>(call.step->items.size()) * call.shape.kv_heads;
  parallel.run(tasks, std::cref(run));  // a copy would allocate
  if (attention.bad_task() == kNoTask) return PQC_OK;
  return PrefixItem(attention.bad_task() / call.shape.kv_heads,
                    Fail(PQC_INVALID_ARGUMENT, "queries", "NaN or infinity in kv head %u's group",
                         attention.bad_task() % call.shape.kv_heads));
}

}  // namespace pqcached::client

#include "client/local/read.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <new>

#include "client/base/error.h"
#include "client/base/pack.h"
#include "client/local/view.h"
#include "kernels/base/status_macros.h"
#include "kernels/rows/gather.h"
#include "kvstore/read/layer_ops.h"

namespace pqcached::client {
namespace {

using kvstore::LayerView;
using kvstore::ParallelFor;
using kvstore::PositionRange;

constexpr size_t kScratchAlignment = 64;
// Fewer rows than this, over all kv heads, are read before other threads would wake up.
constexpr uint64_t kParallelTokens = 2048;

const ParallelFor& Serial() {
  static const ParallelFor serial = kvstore::SerialFor();
  return serial;
}

const ParallelFor& Choose(const ParallelFor& parallel, uint64_t tokens) {
  return tokens >= kParallelTokens ? parallel : Serial();
}

pqc_status CheckQueryPosition(uint64_t position) {
  if (position < kvstore::kMaxSequenceTokens) return PQC_OK;
  return Fail(PQC_INVALID_ARGUMENT, "query.query_position", "%llu, must be below %u",
              static_cast<unsigned long long>(position), kvstore::kMaxSequenceTokens);
}

pqc_status CheckTokens(pqc_token_range tokens, uint32_t stored, const char* name) {
  if (tokens.end <= stored) return PQC_OK;
  return Fail(PQC_OUT_OF_RANGE, name, "[%llu, %llu); %u tokens are stored",
              static_cast<unsigned long long>(tokens.begin),
              static_cast<unsigned long long>(tokens.end), stored);
}

pqc_status CheckPositions(const LayerView& view, const PositionsView& positions, bool ascending) {
  const uint32_t stored = view.token_count();
  const size_t count = size_t{view.shape.kv_heads} * positions.count;
  for (size_t i = 0; i < count; ++i) {
    const uint32_t position = positions.positions[i];
    if (position >= stored) {
      return Fail(PQC_OUT_OF_RANGE, FieldPath::Of("positions[%zu]", i), "%u; %u tokens are stored",
                  position, stored);
    }
    if (ascending && i % positions.count != 0 && position <= positions.positions[i - 1]) {
      return Fail(PQC_INVALID_ARGUMENT, FieldPath::Of("positions[%zu]", i),
                  "%u after %u, must ascend within a kv head", position,
                  positions.positions[i - 1]);
    }
  }
  return PQC_OK;
}

pqc_status AttendOver(const LayerView& view, const QueryView& query,
                      std::span<const uint32_t> positions, const ParallelFor& parallel,
                      Scratch& scratch, float* output, float* lse) {
  const uint64_t length = query.queries.shape[0];
  const size_t rows = length * query.shape.query_heads;
  const ParallelFor& chosen = Choose(parallel, positions.size());
  const bool direct = length == 1;  // the rows are already in the caller's order
  if (!direct) {
    scratch.output.resize(rows * query.shape.value_dim);
    scratch.lse.resize(rows);
  }
  float* target = direct ? output : scratch.output.data();
  float* target_lse = direct ? lse : scratch.lse.data();
  kvstore::AttendLayer(kernels::Exec{}, view,
                       {.queries = scratch.queries,
                        .positions = positions,
                        .output = {target, rows * query.shape.value_dim},
                        .lse = {target_lse, rows}},
                       chosen,
                       scratch.Bytes(chosen.worker_count * kvstore::AttendLayerScratchBytes(view)));
  if (!direct) {
    ScatterRows(query.shape, length, query.shape.value_dim, target, output);
    ScatterRows(query.shape, length, 1, target_lse, lse);
  }
  return PQC_OK;
}

// Bytes [begin, begin + size) of a row.
struct PartBytes {
  size_t begin = 0;
  size_t size = 0;
};

PartBytes BytesOfPart(const FetchView& fetch) {
  const size_t element_bytes = ElementBytes(fetch.shape.dtype);
  const size_t key = fetch.shape.key_dim * element_bytes;
  const size_t value = fetch.shape.value_dim * element_bytes;
  switch (fetch.part) {
    case PQC_KEY:
      return {0, key};
    case PQC_VALUE:
      return {key, value};
    case PQC_ROW:
      break;
  }
  return {0, key + value};
}

}  // namespace

pqc_status PinNewest(LocalSequence& sequence, Pinned* pinned) {
  pinned->sequence = &sequence;
  pinned->lease_epoch = sequence.lease_epoch();
  return sequence.Pin(&pinned->image);
}

void Scratch::Free::operator()(std::byte* bytes) const { std::free(bytes); }

std::span<std::byte> Scratch::Bytes(size_t bytes) {
  if (bytes > byte_count_) {
    // Grows by half, so that a growing sequence does not reallocate at each step.
    const size_t grown =
        (bytes + bytes / 2 + kScratchAlignment) / kScratchAlignment * kScratchAlignment;
    bytes_.reset(static_cast<std::byte*>(std::aligned_alloc(kScratchAlignment, grown)));
    byte_count_ = bytes_ ? grown : 0;
    if (!bytes_) throw std::bad_alloc();
  }
  return {bytes_.get(), bytes};
}

pqc_status ToIndex(const pqc_index& index, const kvstore::IndexDescriptor& default_index,
                   kvstore::IndexDescriptor* descriptor) {
  switch (index.kind) {
    case PQC_INDEX_DEFAULT:
      *descriptor = default_index;
      break;
    case PQC_INDEX_PQ:
      *descriptor = {kvstore::IndexKind::kPq, index.subspaces, index.bits};
      break;
    case PQC_INDEX_FLAT:
      *descriptor = {};
      break;
  }
  return PQC_OK;
}

pqc_status ToTerms(const pqc_selection& selection, const kvstore::IndexDescriptor& default_index,
                   kvstore::Selection* terms) {
  constexpr uint64_t kMost = kvstore::kMaxSequenceTokens;
  const struct {
    const char* name;
    uint64_t tokens;
  } ranges[] = {{"sink_tokens", selection.sink_tokens}, {"window_tokens", selection.window_tokens}};
  for (const auto& range : ranges) {
    if (range.tokens > kMost) {
      return Fail(PQC_INVALID_ARGUMENT, FieldPath::Of("selection.%s", range.name),
                  "%llu, must be at most %llu", static_cast<unsigned long long>(range.tokens),
                  static_cast<unsigned long long>(kMost));
    }
  }
  RETURN_IF_ERROR(ToIndex(selection.index, default_index, &terms->index));
  static_assert(static_cast<int>(kvstore::GroupRule::kSumSoftmax) == PQC_SUM_SOFTMAX + 1 &&
                static_cast<int>(kvstore::GroupRule::kMaxLogit) == PQC_MAX_LOGIT + 1);
  terms->group_rule = static_cast<kvstore::GroupRule>(selection.group_rule + 1);
  terms->sink_tokens = static_cast<uint32_t>(selection.sink_tokens);
  terms->window_tokens = static_cast<uint32_t>(selection.window_tokens);
  terms->excluded.clear();
  for (uint32_t i = 0; i < selection.excluded_count; ++i) {
    // Larger positions are clamped to just beyond the longest sequence, which Resolve refuses.
    terms->excluded.push_back(
        {static_cast<uint32_t>(std::min(selection.excluded[i].begin, kMost + 1)),
         static_cast<uint32_t>(std::min(selection.excluded[i].end, kMost + 1))});
  }
  const bool by_count = selection.budget == PQC_BUDGET_COUNT;
  terms->budget_kind = by_count ? kvstore::BudgetKind::kCount : kvstore::BudgetKind::kRatio;
  terms->budget_count = selection.token_count;
  terms->budget_ratio = selection.ratio;
  return PQC_OK;
}

pqc_status SelectLocally(const Pinned& pinned, const QueryView& query,
                         const kvstore::Selection& terms, const ParallelFor& parallel,
                         Scratch& scratch, LocalSelected* selected) {
  RETURN_IF_ERROR(CheckQueryPosition(query.query_position));
  OpenedLayer opened;
  RETURN_IF_ERROR(
      OpenLayer(pinned, query.layer, query.shape, {terms.index, "selection.index"}, &opened));
  LayerView view = opened.view;
  const kvstore::ResolvedSelection& resolved = scratch.resolved;
  kvstore::Resolve(terms, query.query_position, view.token_count(), &scratch.resolved);
  if (!resolved.refusal.ok()) return Fail(resolved.refusal);
  RETURN_IF_ERROR(CheckCoded(view, {terms.index, "selection.index"}, resolved.candidates));
  GatherQueries(query, &scratch.queries);
  WidenGroup(&view, query.queries.shape[0]);
  *selected = {resolved.select_count, resolved.sink_tokens, resolved.window_tokens};
  scratch.positions.resize(size_t{view.shape.kv_heads} * resolved.select_count);
  if (resolved.select_count == 0) return PQC_OK;
  const kernels::Exec exec{};
  const ParallelFor& chosen =
      Choose(parallel, uint64_t{resolved.candidate_count} * view.shape.kv_heads);
  kvstore::SelectLayer(
      exec, view,
      {.index = terms.index,
       .rule = terms.group_rule,
       .candidates = resolved.candidates,
       .queries = scratch.queries,
       .select_count = resolved.select_count,
       .positions = scratch.positions},
      chosen,
      scratch.Bytes(chosen.worker_count *
                    kvstore::SelectScratchBytes(exec, view, terms.index, resolved.candidates)));
  return PQC_OK;
}

pqc_status AttendLocally(const Pinned& pinned, const QueryView& query, uint32_t count,
                         const ParallelFor& parallel, Scratch& scratch, float* output, float* lse) {
  OpenedLayer opened;
  RETURN_IF_ERROR(OpenLayer(pinned, query.layer, query.shape, {}, &opened));
  // Another thread may have rolled the sequence back between selecting and attending.
  for (uint32_t kv_head = 0; count > 0 && kv_head < query.shape.kv_heads; ++kv_head) {
    if (scratch.positions[(kv_head + 1) * size_t{count} - 1] >= opened.view.token_count()) {
      return Fail(PQC_ABORTED, "sequence", "it was rolled back during the call");
    }
  }
  WidenGroup(&opened.view, query.queries.shape[0]);
  const size_t positions = size_t{query.shape.kv_heads} * count;
  return AttendOver(opened.view, query, {scratch.positions.data(), positions}, parallel, scratch,
                    output, lse);
}

pqc_status AttendPositionsLocally(const Pinned& pinned, const QueryView& query,
                                  const PositionsView& positions, const ParallelFor& parallel,
                                  Scratch& scratch, float* output, float* lse) {
  OpenedLayer opened;
  RETURN_IF_ERROR(OpenLayer(pinned, query.layer, query.shape, {}, &opened));
  RETURN_IF_ERROR(CheckPositions(opened.view, positions, /*ascending=*/true));
  GatherQueries(query, &scratch.queries);
  WidenGroup(&opened.view, query.queries.shape[0]);
  const size_t count = size_t{query.shape.kv_heads} * positions.count;
  return AttendOver(opened.view, query, {positions.positions, count}, parallel, scratch, output,
                    lse);
}

pqc_status ScoreLocally(const Pinned& pinned, const QueryView& query,
                        const kvstore::IndexDescriptor& index, pqc_token_range tokens,
                        const ParallelFor& parallel, Scratch& scratch, const ScoresOut& out) {
  OpenedLayer opened;
  RETURN_IF_ERROR(OpenLayer(pinned, query.layer, query.shape, {index, "index"}, &opened));
  const LayerView& view = opened.view;
  RETURN_IF_ERROR(CheckTokens(tokens, view.token_count(), "tokens"));
  const PositionRange range{static_cast<uint32_t>(tokens.begin), static_cast<uint32_t>(tokens.end)};
  RETURN_IF_ERROR(CheckCoded(view, {index, "index"}, {&range, 1}));
  GatherQueries(query, &scratch.queries);
  const uint64_t count = tokens.end - tokens.begin;
  const uint32_t heads = view.shape.query_heads;
  std::vector<float> own_logits(out.logits ? 0 : heads * count);
  scratch.lse.resize(size_t{2} * heads);
  float* max = out.max ? out.max : scratch.lse.data();
  float* sum_exp = out.sum_exp ? out.sum_exp : scratch.lse.data() + heads;
  const ParallelFor& chosen = Choose(parallel, count * view.shape.kv_heads);
  kvstore::ScoreLayer(
      kernels::Exec{}, view,
      {.index = index,
       .tokens = range,
       .queries = scratch.queries,
       .logits = {out.logits ? out.logits : own_logits.data(), heads * count},
       .max = {max, heads},
       .sum_exp = {sum_exp, heads}},
      chosen, scratch.Bytes(chosen.worker_count * kvstore::ScoreScratchBytes(view, index, range)));
  return PQC_OK;
}

pqc_status FetchBlocksLocally(const Pinned& pinned, const FetchView& fetch, pqc_token_range tokens,
                              std::byte* out) {
  OpenedLayer opened;
  RETURN_IF_ERROR(OpenLayer(pinned, fetch.layer, fetch.shape, {}, &opened));
  const LayerView& view = opened.view;
  RETURN_IF_ERROR(CheckTokens(tokens, view.token_count(), "tokens"));
  const PartBytes part = BytesOfPart(fetch);
  for (uint32_t kv_head = 0; kv_head < view.shape.kv_heads; ++kv_head) {
    for (const kvstore::SegmentView& segment : view.segments) {
      const uint64_t begin = std::max<uint64_t>(tokens.begin, segment.first_position);
      const uint64_t end =
          std::min<uint64_t>(tokens.end, segment.first_position + segment.token_count);
      const std::byte* row =
          begin < end
              ? segment.rows[kv_head] + (begin - segment.first_position) * view.shape.row_bytes
              : nullptr;
      for (uint64_t token = begin; token < end; ++token, row += view.shape.row_bytes) {
        std::copy_n(row + part.begin, part.size, out);
        out += part.size;
      }
    }
  }
  return PQC_OK;
}

pqc_status FetchTokensLocally(const Pinned& pinned, const FetchView& fetch,
                              const PositionsView& positions, std::byte* out) {
  OpenedLayer opened;
  RETURN_IF_ERROR(OpenLayer(pinned, fetch.layer, fetch.shape, {}, &opened));
  const LayerView& view = opened.view;
  RETURN_IF_ERROR(CheckPositions(view, positions, /*ascending=*/false));
  const PartBytes part = BytesOfPart(fetch);
  const uint32_t* position = positions.positions;
  for (uint32_t kv_head = 0; kv_head < view.shape.kv_heads; ++kv_head) {
    for (uint32_t i = 0; i < positions.count; ++i, ++position) {
      const auto segment = std::upper_bound(
          view.segments.begin(), view.segments.end(), *position,
          [](uint32_t at, const kvstore::SegmentView& other) { return at < other.first_position; });
      const kvstore::SegmentView& holder = *(segment - 1);
      const std::byte* row =
          holder.rows[kv_head] + size_t{*position - holder.first_position} * view.shape.row_bytes;
      std::copy_n(row + part.begin, part.size, out);
      out += part.size;
    }
  }
  return PQC_OK;
}

}  // namespace pqcached::client

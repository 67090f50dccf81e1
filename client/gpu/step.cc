// Steps on a GPU: describes sequences to it, launches layers, and copies rows of new tokens to the
// host.
#include <algorithm>

#include "client/base/arguments.h"
#include "client/base/error.h"
#include "client/gpu/gpu.h"
#include "client/local/layer_source.h"
#include "client/step/decode.h"
#include "client/step/step.h"
#include "kernels/base/status_macros.h"
#include "kvstore/read/indexes/index_types.h"
#include "kvstore/read/layer_view.h"
#include "kvstore/read/reader.h"
#include "kvstore/read/resolve.h"

namespace pqcached::client {
namespace {

// Converts a segment's view to addresses in the pool.
gpu::StepSegment SegmentOf(const kvstore::SegmentView& from) {
  gpu::StepSegment segment{.first_position = from.first_position,
                           .token_count = from.token_count,
                           .rows = from.rows.data()};
  if (!from.index_data || !from.codebook) return segment;
  segment.planes = kvstore::Planes(*from.index_data, 0);
  segment.planes_head_stride = from.index_data->head_stride_bytes;
  segment.plane_stride = from.index_data->plane_stride_bytes;
  segment.centroids = kvstore::Centroids(*from.codebook, 0).data();
  segment.centroids_head_stride = from.codebook->head_stride_bytes;
  segment.codebook_generation = from.codebook->codebook_generation;
  segment.paired_dims = from.codebook->paired_dims;
  return segment;
}

// Returns whether calls of the step may select in a layer.
bool Selects(const GpuState& gpu, const pqc_step& step, uint32_t ordinal) {
  return step.has_selection && gpu.kinds[ordinal] == gpu::StepLayerKind::kSelected;
}

// Resolves the step's selection in the layer at `place`. Sets the candidates and their number.
pqc_status DescribeCandidates(GpuState& gpu, const pqc_step& step, StepItem& item,
                              const kvstore::LayerRequest& request, size_t place) {
  if (step.decodes && !HasCandidates(step, item)) return CheckUnusedTerms(step.selection, item);
  const kvstore::LayerView& view = gpu.opened[place].view;
  kvstore::ResolvedSelection& resolved = (*item.scratch)->resolved;
  kvstore::Resolve(step.selection, item.query_position, view.token_count(), &resolved);
  if (!resolved.refusal.ok()) return FailInStep(resolved.refusal);
  if (const kvstore::Refusal refusal = CheckCoded(view, request, resolved.candidates);
      !refusal.ok()) {
    return FailInStep(refusal);
  }
  std::vector<gpu::StepRange>& ranges = gpu.ranges[place];
  for (const kvstore::PositionRange& range : resolved.candidates) {
    ranges.push_back({range.begin, range.end});
  }
  gpu.step_layers[place].select_count = resolved.select_count;
  return PQC_OK;
}

// Describes the candidates of an item in layers of kind full.
pqc_status DescribeFull(GpuState& gpu, pqc_step& step, size_t number) {
  StepItem& item = step.items[number];
  std::vector<gpu::StepRange>& ranges = gpu.full_ranges[number];
  ranges.clear();
  gpu.full_counts[number] = 0;
  if (!step.has_selection) return PQC_OK;
  kvstore::ResolvedSelection& resolved = (*item.scratch)->resolved;
  kvstore::Resolve(TermsOf(kvstore::LayerKind::kFull, step.selection), item.query_position,
                   kvstore::kMaxSequenceTokens, &resolved);
  if (!resolved.refusal.ok()) return FailInStep(resolved.refusal);
  for (const kvstore::PositionRange& range : resolved.candidates) {
    ranges.push_back({range.begin, range.end});
  }
  gpu.full_counts[number] = resolved.candidate_count;
  gpu.sequences[number].candidates = ranges.data();
  gpu.sequences[number].candidate_count = static_cast<uint32_t>(ranges.size());
  return PQC_OK;
}

// Describes one layer of one item; `place` is its index in the step's arrays.
pqc_status DescribeLayer(GpuState& gpu, pqc_step& step, StepItem& item, uint32_t ordinal,
                         size_t place) {
  OpenedLayer& opened = gpu.opened[place];
  const bool selects = Selects(gpu, step, ordinal);
  kvstore::LayerRequest request{.layer = gpu.layers[ordinal], .index_field = "selection.index"};
  if (selects) request.index = step.selection.index;
  if (const kvstore::Refusal refusal = OpenLayer(
          item.pinned, item.sequence->cache->stored_layers.at(request.layer), request, &opened);
      !refusal.ok()) {
    return FailInStep(refusal);
  }
  gpu::StepLayer& layer = gpu.step_layers[place];
  layer = {};
  std::vector<gpu::StepRange>& ranges = gpu.ranges[place];
  ranges.clear();
  if (selects) {
    RETURN_IF_ERROR(DescribeCandidates(gpu, step, item, request, place));
  }
  std::vector<gpu::StepSegment>& segments = gpu.segments[place];
  segments.clear();
  bool is_coded = selects;
  for (const kvstore::SegmentView& segment : opened.view.segments) {
    segments.push_back(SegmentOf(segment));
    layer.row_tokens = segment.first_position + segment.token_count;
    is_coded = is_coded && segments.back().planes;
    if (is_coded) layer.coded_tokens = layer.row_tokens;
  }
  // Rows that some layers do not have yet are not used.
  const uint32_t readable = item.sequence->local->ReadableTokens(*item.pinned.image);
  layer.row_tokens = std::min(layer.row_tokens, readable);
  layer.coded_tokens = std::min(layer.coded_tokens, readable);
  layer.segments = segments.data();
  layer.segment_count = static_cast<uint32_t>(segments.size());
  layer.candidates = ranges.data();
  layer.candidate_count = static_cast<uint32_t>(ranges.size());
  return PQC_OK;
}

pqc_status DescribeItem(GpuState& gpu, pqc_step& step, size_t number) {
  StepItem& item = step.items[number];
  LocalSequence& local = *item.sequence->local;
  // before any layer is opened, because the image may change
  for (uint32_t i = 0; i < gpu.layers.size(); ++i) {
    if (!Selects(gpu, step, i)) continue;
    RETURN_IF_ERROR(WaitReady(step, step.selection, &gpu.layers[i], &item));
  }
  const uint64_t sequence_id = item.sequence->sequence_id;
  const auto seen = gpu.seen.find(sequence_id);
  const uint64_t lease_id = local.lease().lease_id;
  const bool known = seen != gpu.seen.end() && seen->second.lease_id == lease_id;
  gpu.sequences[number] = {
      .sequence = sequence_id,
      .unchanged_tokens = known ? local.UnchangedSince(seen->second.lease_epoch) : 0,
      .query_begin = static_cast<uint32_t>(item.query_begin),
      .row_end = RowEnd(step, item)};
  gpu.seen[sequence_id] = {
      .lease_epoch = item.pinned.lease_epoch, .lease_id = lease_id, .last_step = gpu.step_count};
  for (uint32_t ordinal = 0; ordinal < gpu.layers.size(); ++ordinal) {
    const size_t place = number * gpu.layers.size() + ordinal;
    RETURN_IF_ERROR(DescribeLayer(gpu, step, item, ordinal, place));
    if (Selects(gpu, step, ordinal)) step.counts[number] = gpu.step_layers[place].select_count;
  }
  return DescribeFull(gpu, step, number);
}

// Forgets sequences that have lost their seat, so that they are described again in full: the most
// recently used sequences have the seats.
void DropUnseated(GpuState& gpu) {
  while (gpu.seen.size() > gpu.sequence_capacity) {
    gpu.seen.erase(std::ranges::min_element(
        gpu.seen, {}, [](const auto& entry) { return entry.second.last_step; }));
  }
}

// Makes the device release the previous pool before it uses another one. An older sidecar may
// remove pages of the pool: then the host reads its rows.
pqc_status TakePool(GpuState& gpu, const pqc_step& step) {
  const std::shared_ptr<Mapping> pool = step.items.front().pinned.image->shared_pool();
  for (const StepItem& item : step.items) {
    if (item.pinned.image->shared_pool() == pool) continue;
    return SetRetry(kRetryMemory, Fail(PQC_UNAVAILABLE, "", "the sidecar's worker was replaced"));
  }
  if (gpu.pool == pool) return PQC_OK;
  const pqc_status held = pool->HoldPages();
  if (held != PQC_OK && held != PQC_UNIMPLEMENTED) return held;
  ClearLastError();  // an older sidecar's refusal is no failure of this call
  RETURN_IF_ERROR(Report(gpu.steps->ReleasePool(), "gpu"));
  gpu.held.clear();
  gpu.seen.clear();
  gpu.pool = pool;
  gpu.locks_pool = held == PQC_OK;
  return PQC_OK;
}

pqc_status CheckStep(const GpuState& gpu, const pqc_step& step) {
  if (step.has_selection && step.selection.per_query_head) {
    return Fail(PQC_UNIMPLEMENTED, "options.selection.group_rule",
                "PQC_PER_QUERY_HEAD is not supported in steps of a GPU");
  }
  if (step.has_selection && step.selection.rerank_factor != 1.0f) {
    return Fail(PQC_UNIMPLEMENTED, "options.selection.rerank_factor",
                "%g, must be 0 or 1 in steps of a GPU", double{step.selection.rerank_factor});
  }
  if (step.has_selection && step.selection.budget_kind == kvstore::BudgetKind::kMass) {
    return Fail(PQC_UNIMPLEMENTED, "options.selection.attention_mass",
                "not supported in steps of a GPU");
  }
  if (step.has_selection && step.selection.tail_estimate) {
    return Fail(PQC_UNIMPLEMENTED, "options.selection.tail_estimate",
                "1, must be 0 in steps of a GPU");
  }
  if (step.has_selection && step.cache->has_indexed_layers && step.selection.index != gpu.index) {
    return Fail(PQC_INVALID_ARGUMENT, "options.selection.index", "must be that of pqc_gpu_open, %s",
                kvstore::NameOf(gpu.index).c_str());
  }
  const uint32_t length = step.items.front().query_length;
  for (size_t i = 1; i < step.items.size(); ++i) {
    if (step.items[i].query_length == length) continue;
    return Fail(PQC_UNIMPLEMENTED, FieldPath::Of("items[%zu].query_length", i),
                "%u, but items[0] has %u; on a GPU all have one", step.items[i].query_length,
                length);
  }
  return PQC_OK;
}

kernels::GroupRule RuleOf(const pqc_step& step) { return step.selection.group_rule; }

// Replaces a block's device rows, those of the whole step, by the host's copy, which is complete
// when the step's work is done.
pqc_status FetchRows(GpuState& gpu, RowBlock* block) {
  uint32_t ordinal = 0;
  RETURN_IF_ERROR(FindGpuLayer(gpu, block->layer, &ordinal));
  TensorView& keys = block->keys;
  TensorView& values = block->values;
  RETURN_IF_ERROR(CheckDeviceRows(*block));
  const auto tokens = static_cast<uint32_t>(keys.shape[0]);
  const void* rows = nullptr;
  const gpu::Outcome fetched = gpu.steps->Fetch(ordinal, DeviceRowsOf(*block), &rows);
  if (!fetched.ok()) return Report(fetched, "layers");
  const int64_t row = int64_t{gpu.shape.key_dim} + gpu.shape.value_dim;
  const auto at = [&](TensorView* view, size_t first) {
    view->data = static_cast<const std::byte*>(rows) + first * kernels::DTypeBytes(gpu.shape.dtype);
    view->dtype = gpu.shape.dtype;
    view->strides[0] = row;
    view->strides[1] = row * tokens;
  };
  at(&keys, 0);
  at(&values, gpu.shape.key_dim);
  return PQC_OK;
}

// Reports an element of an argument in device memory that the work of the step has refused.
pqc_status ReportRefused(const GpuState& gpu) {
  using Argument = gpu::StepRefusal::Argument;
  const gpu::StepRefusal refused = gpu.steps->Refused();
  if (refused.argument == Argument::kNone) return PQC_OK;
  const uint32_t layer = gpu.layers[refused.layer];
  const auto element = static_cast<unsigned long long>(refused.element);
  if (refused.argument == Argument::kRange) {
    return Fail(PQC_INVALID_ARGUMENT, FieldPath::Of("ranges[%llu]", element),
                "in layer %u it began behind its end, or ended beyond the rows that the step reads",
                layer);
  }
  if (refused.argument == Argument::kDecodedKey || refused.argument == Argument::kDecodedValue) {
    return Fail(PQC_INVALID_ARGUMENT, refused.argument == Argument::kDecodedKey ? "keys" : "values",
                "NaN or infinity in query token %llu of layer %u, in the dtype of the cache",
                element, layer);
  }
  if (refused.argument == Argument::kPageCapacity) {
    return Fail(PQC_OUT_OF_RANGE, "out.capacity",
                "in layer %u it was less than the pages of items[%llu], in a graph that was "
                "captured in another step",
                layer, element);
  }
  if (refused.argument == Argument::kListLength) {
    return Fail(PQC_INVALID_ARGUMENT, FieldPath::Of("lists.lengths[%llu]", element),
                "in layer %u it was more than lists.capacity", layer);
  }
  return Fail(PQC_INVALID_ARGUMENT, FieldPath::Of("lists.positions[%llu]", element),
              "in layer %u it was negative, not below the end of the rows that the step reads, or, "
              "with lists.logits, not above the position before it",
              layer);
}

// Fills the counts of a call, for which the host knows them.
void FillCounts(const GpuState& gpu, uint32_t ordinal, const LayerCall& call) {
  if (!call.counts) return;
  const pqc_step& step = *call.step;
  switch (gpu.kinds[ordinal]) {
    case gpu::StepLayerKind::kSelected:
      std::copy(step.counts.begin(), step.counts.end(), call.counts);
      break;
    case gpu::StepLayerKind::kFull:
      std::copy(gpu.full_counts.begin(), gpu.full_counts.end(), call.counts);
      break;
    case gpu::StepLayerKind::kWindow:
      std::fill_n(call.counts, step.items.size(), 0);
      break;
  }
}

// Waits until the rows that the step reads in the pool are stored.
pqc_status WaitForRows(pqc_step& step, size_t number) {
  if (step.decodes) return TakeRecentRows(step, number);
  return WaitForTokens(step, number, RowEnd(step, step.items[number]));
}

}  // namespace

uint32_t RowEnd(const pqc_step& step, const StepItem& item) {
  const uint64_t context = item.query_position + 1;
  // Where the window begins or, without a selection, the query position.
  const uint64_t window = step.has_selection ? step.selection.window_tokens : 1;
  return static_cast<uint32_t>(std::min(context - std::min(window, context), item.end_before_step));
}

pqc_status CheckDeviceRows(const RowBlock& block) {
  if (!block.keys.paged() && !block.values.paged() && block.keys.strides[2] == 1 &&
      block.values.strides[2] == 1) {
    return PQC_OK;
  }
  return Fail(PQC_UNIMPLEMENTED, "keys",
              "on a GPU they must have no block table, and contiguous dims");
}

gpu::StepRows DeviceRowsOf(const RowBlock& block) {
  return {.keys = block.keys.data,
          .values = block.values.data,
          .key_dtype = block.keys.dtype,
          .value_dtype = block.values.dtype,
          .key_strides = {block.keys.strides[0], block.keys.strides[1]},
          .value_strides = {block.values.strides[0], block.values.strides[1]},
          .token_count = static_cast<uint32_t>(block.keys.shape[0])};
}

gpu::StepQueries DeviceQueriesOf(const TensorView& view) {
  return {.data = view.data,
          .dtype = view.dtype,
          .token_stride = view.strides[0],
          .head_stride = view.strides[1],
          .dim_stride = view.strides[2]};
}

pqc_status GpuState::Begin(pqc_step& step, void* stream) {
  RETURN_IF_ERROR(CheckStep(*this, step));
  if (step.decodes) RETURN_IF_ERROR(CheckDecodingStep(*this, step));
  step.decode.unstored.assign(step.items.size(), {});
  step.decode.unstored_rows.clear();
  const size_t items = step.items.size();
  const size_t places = items * layers.size();
  opened.resize(places);
  segments.resize(std::max(places, segments.size()));
  ranges.resize(std::max(places, ranges.size()));
  step_layers.resize(places);
  sequences.resize(items);
  full_ranges.resize(std::max(items, full_ranges.size()));
  full_counts.assign(items, 0);
  step.counts.assign(items, 0);
  step.stream = stream;
  ++step_count;
  pqc_status status = PQC_OK;
  for (size_t i = 0; i < items && status == PQC_OK; ++i) {
    status = WaitForRows(step, i);
    if (status != PQC_OK) break;
    status = DescribeItem(*this, step, i);
    if (status != PQC_OK) status = PrefixItem(i, status);
  }
  if (status == PQC_OK) DescribeOthers(*this, step);
  if (status == PQC_OK && step.decodes) DescribeOwnRows(*this, step);
  if (status == PQC_OK) status = TakePool(*this, step);
  if (status == PQC_OK) {
    status = Report(steps->Begin({.sequences = sequences.data(),
                                  .count = static_cast<uint32_t>(items),
                                  .query_length = step.items.front().query_length,
                                  .layers = step_layers.data(),
                                  .selects = step.has_selection,
                                  .selects_per_token = step.select_per_token,
                                  .decodes = step.decodes,
                                  .excluded = excluded.data(),
                                  .excluded_count = static_cast<uint32_t>(excluded.size()),
                                  .pool = pool->data(),
                                  .pool_bytes = pool->size_bytes(),
                                  .locks_pool = locks_pool,
                                  .stream = stream}),
                    "gpu");
  }
  opened.clear();  // addresses in the pool stay valid, because the step pins the images
  if (status == PQC_OK) {
    step.gpu_begun = true;
    DropUnseated(*this);
    return PQC_OK;
  }
  for (const StepItem& item : step.items) seen.erase(item.sequence->sequence_id);
  return status;
}

pqc_status GpuState::Attend(const LayerCall& call) {
  const pqc_step& step = *call.step;
  uint32_t ordinal = 0;
  RETURN_IF_ERROR(FindGpuLayer(*this, call.layer, &ordinal));
  const gpu::Outcome launched =
      steps->Attend(ordinal, DeviceQueriesOf(call.queries), RuleOf(step), call.output, call.lse);
  if (!launched.ok()) return Report(launched, "gpu");
  FillCounts(*this, ordinal, call);
  return PQC_OK;
}

pqc_status GpuState::Decode(const LayerCall& call, const RowBlock& rows) {
  uint32_t ordinal = 0;
  RETURN_IF_ERROR(FindGpuLayer(*this, call.layer, &ordinal));
  RETURN_IF_ERROR(CheckDeviceRows(rows));
  const gpu::Outcome launched =
      steps->Decode(ordinal, DeviceQueriesOf(call.queries), DeviceRowsOf(rows), RuleOf(*call.step),
                    call.output, call.lse);
  if (!launched.ok()) return Report(launched, "gpu");
  FillCounts(*this, ordinal, call);
  return PQC_OK;
}

pqc_status GpuState::AttendPositions(const LayerCall& call, const pqc_position_lists& lists) {
  if (lists.capacity > selected_capacity) {
    return Fail(PQC_OUT_OF_RANGE, "lists.capacity", "%u, must be at most selected_capacity, %u",
                lists.capacity, selected_capacity);
  }
  uint32_t ordinal = 0;
  RETURN_IF_ERROR(FindGpuLayer(*this, call.layer, &ordinal));
  const gpu::StepQueries queries = DeviceQueriesOf(call.queries);  // or logits
  const gpu::Outcome launched =
      steps->AttendPositions(ordinal, queries,
                             {.positions = lists.positions,
                              .lengths = lists.lengths,
                              .list_count = lists.list_count,
                              .capacity = lists.capacity,
                              .logits = call.has_logits ? &queries : nullptr},
                             call.output, call.lse);
  return Report(launched, "gpu");
}

pqc_status GpuState::AttendRanges(const LayerCall& call, const pqc_token_range* of_items) {
  static_assert(sizeof(pqc_token_range) == 2 * sizeof(uint64_t));
  uint32_t ordinal = 0;
  RETURN_IF_ERROR(FindGpuLayer(*this, call.layer, &ordinal));
  const gpu::Outcome launched =
      steps->AttendRanges(ordinal, DeviceQueriesOf(call.queries),
                          reinterpret_cast<const uint64_t*>(of_items), call.output, call.lse);
  return Report(launched, "gpu");
}

pqc_status GpuState::Finish(pqc_step& step, std::vector<RowBlock>* blocks) {
  for (size_t i = 0; blocks && i < blocks->size(); ++i) {
    RETURN_IF_ERROR(FetchRows(*this, &(*blocks)[i]));
  }
  RETURN_IF_ERROR(Report(steps->End(), "gpu"));
  step.gpu_begun = false;
  RETURN_IF_ERROR(Report(steps->Wait(), "gpu"));
  // Updates of the block caches continue to read until the next step begins.
  held.clear();
  for (const StepItem& item : step.items) held.push_back(item.pinned.image);
  return ReportRefused(*this);
}

void GpuState::Release(pqc_step& step) {
  if (step.gpu_begun) {  // abandoned: launched work may still read
    (void)steps->End();
    (void)steps->Wait();
    for (const StepItem& item : step.items) held.push_back(item.pinned.image);
    step.gpu_begun = false;
  }
  busy = false;
}

pqc_status GpuState::Select(const LayerCall& call, const pqc_gpu_positions& out) {
  // The full capacity, not only this step's k: a graph that is captured now is replayed with other
  // values.
  if (out.stride < selected_capacity) {
    return Fail(PQC_OUT_OF_RANGE, "out.stride", "%llu, must be at least selected_capacity, %u",
                static_cast<unsigned long long>(out.stride), selected_capacity);
  }
  uint32_t ordinal = 0;
  RETURN_IF_ERROR(FindGpuLayer(*this, call.layer, &ordinal));
  if (kinds[ordinal] != gpu::StepLayerKind::kSelected) {
    return Fail(PQC_UNIMPLEMENTED, "layer",
                "layer %u has no index, and positions of such layers are not listed on a GPU",
                call.layer);
  }
  return Report(steps->Select(ordinal, DeviceQueriesOf(call.queries), RuleOf(*call.step),
                              out.positions, out.stride, out.counts),
                "gpu");
}

}  // namespace pqcached::client

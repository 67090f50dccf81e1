// DeviceSteps: the calls for one layer, which launch its work on the step's stream.
#include <cuda_runtime.h>

#include <cstring>
#include <string>
#include <utility>

#include "gpu/device_steps.h"
#include "kernels/base/status_macros.h"

namespace pqcached::gpu {

Status DeviceSteps::CheckLayer(uint32_t layer, const StepQueries& queries) const {
  if (query_length_ == 0) return {Code::kInvalid, "no step is under way"};
  if (layer >= options_.layer_count) {
    return {Code::kInvalid,
            "layer " + std::to_string(layer) + " of " + std::to_string(options_.layer_count)};
  }
  return CheckDevicePointer(queries.data, "queries", device_);
}

Status DeviceSteps::CheckSelects(uint32_t layer) const {
  if (kinds_[layer] == StepLayerKind::kSelected) return {};
  return {Code::kInvalid, "layer " + std::to_string(layer) + " has no index to select by"};
}

Status DeviceSteps::ArrangeQueries(const StepQueries& queries, const QueryTokens& tokens) {
  const int64_t first = tokens.first * queries.token_stride;
  const std::byte* const data = static_cast<const std::byte*>(queries.data) +
                                first * static_cast<int64_t>(kernels::DTypeBytes(queries.dtype));
  return FromKernel(kernels::cuda::ArrangeQueries({.shape = seat_shape(tokens.count),
                                                   .seats = tables_.seats(),
                                                   .key_dim = options_.key_dim,
                                                   .dtype = queries.dtype,
                                                   .queries = data,
                                                   .token_stride = queries.token_stride,
                                                   .head_stride = queries.head_stride,
                                                   .dim_stride = queries.dim_stride,
                                                   .lane_queries = lane_queries_},
                                                  stream_),
                    "arranging queries");
}

// Returns the candidates of all lanes.
kernels::cuda::SelectTables DeviceSteps::candidates(uint32_t layer) const {
  const StepTables::Layer& tables = tables_.layer(layer);
  return {.lane_capacity = lane_capacity_,
          .chunk_capacity = lane_capacity_ * tables_.chunk_capacity(),
          .lanes = tables.select_lanes,
          .chunks = tables.chunks};
}

// Prepares the scores of candidates for some query tokens of each item: the tables of their logits,
// and the codes. Called for the tokens of a step in order, each time before EndScores.
Status DeviceSteps::BeginScores(uint32_t layer, const StepQueries& queries,
                                const QueryTokens& tokens) {
  RETURN_IF_ERROR(ArrangeQueries(queries, tokens));
  const kernels::cuda::KernelStatus status =
      kernels::cuda::BuildTables({.geometry = options_.geometry,
                                  .group_size = tokens.count * options_.group_size,
                                  .scale = options_.scale,
                                  .task_capacity = lane_capacity_ * options_.codebook_capacity,
                                  .tasks = tables_.layer(layer).tasks,
                                  .tables = score_tables_},
                                 stream_);
  if (!status.ok()) return FromKernel(status, "building score tables");
  if (tokens.first > 0) return {};
  return codes_.BeginLayer(stream_, tables_.code_layer(layer));
}

Status DeviceSteps::EndScores(uint32_t layer, const QueryTokens& tokens) {
  const bool is_last = tokens.first + tokens.count == query_length_;
  return is_last ? codes_.EndLayer(stream_, tables_.code_layer(layer)) : Status{};
}

// Selects for some query tokens of each item. Called for the tokens of a step in order.
Status DeviceSteps::SelectTokens(uint32_t layer, const StepQueries& queries,
                                 kernels::GroupRule rule, const QueryTokens& tokens) {
  RETURN_IF_ERROR(BeginScores(layer, queries, tokens));
  const kernels::cuda::KernelStatus status =
      kernels::cuda::PqSelect({.geometry = options_.geometry,
                               .group_size = tokens.count * options_.group_size,
                               .rule = rule,
                               .candidates = candidates(layer),
                               .table_capacity = lane_capacity_ * options_.codebook_capacity,
                               .tables = score_tables_,
                               .selection = {.positions = positions_,
                                             .position_stride = options_.selected_capacity,
                                             .counts = counts_},
                               .scratch = select_scratch_,
                               .scratch_bytes = select_scratch_bytes_},
                              stream_);
  if (!status.ok()) return FromKernel(status, "selecting");
  return EndScores(layer, tokens);
}

Outcome DeviceSteps::Select(uint32_t layer, const StepQueries& queries, kernels::GroupRule rule,
                            uint32_t* positions, size_t stride, uint32_t* counts) {
  return OnDevice(options_.device, [&]() -> Status {
    RETURN_IF_ERROR(CheckLayer(layer, queries));
    RETURN_IF_ERROR(CheckSelects(layer));
    for (const auto& [memory, name] : {std::pair{positions, "positions"}, {counts, "counts"}}) {
      RETURN_IF_ERROR(CheckDevicePointer(memory, name, device_));
    }
    for (uint32_t i = 0; i < selection_count(); ++i) {
      RETURN_IF_ERROR(SelectTokens(layer, queries, rule, TokensOf(i)));
      const kernels::cuda::KernelStatus arranged =
          kernels::cuda::ArrangePositions({.shape = seat_shape(query_length_),
                                           .seats = tables_.seats(),
                                           .lane_positions = positions_,
                                           .lane_stride = options_.selected_capacity,
                                           .lane_counts = counts_,
                                           .lists_per_item = selection_count(),
                                           .list = i,
                                           .positions = positions,
                                           .stride = stride,
                                           .counts = counts},
                                          stream_);
      if (!arranged.ok()) return FromKernel(arranged, "arranging positions");
    }
    return codes_.JoinSideStream(stream_);
  });
}

// Selects pages by the scores that BeginScores has prepared.
Status DeviceSteps::LaunchPages(uint32_t layer, kernels::GroupRule rule, const StepPages& pages) {
  return FromKernel(kernels::cuda::SelectPages({.seat_shape = seat_shape(query_length_),
                                                .seats = tables_.seats(),
                                                .items = tables_.page_items(),
                                                .excluded = tables_.excluded(),
                                                .excluded_capacity = tables_.excluded_capacity(),
                                                .geometry = options_.geometry,
                                                .rule = rule,
                                                .candidates = candidates(layer),
                                                .lane_chunk_capacity = tables_.chunk_capacity(),
                                                .tables = score_tables_,
                                                .token_capacity = options_.token_capacity,
                                                .pages = {.page_tokens = pages.page_tokens,
                                                          .heads = pages.heads,
                                                          .with_sink = pages.with_sink,
                                                          .with_window = pages.with_window,
                                                          .lists = pages.lists,
                                                          .capacity = pages.capacity,
                                                          .lengths = pages.lengths},
                                                .refused_capacity = refused_element(
                                                    layer, StepRefusal::Argument::kPageCapacity),
                                                .scratch = page_scratch_,
                                                .scratch_bytes = page_scratch_bytes_},
                                               stream_),
                    "selecting pages");
}

Outcome DeviceSteps::SelectPages(uint32_t layer, const StepQueries& queries,
                                 kernels::GroupRule rule, const StepPages& pages) {
  return OnDevice(options_.device, [&]() -> Status {
    RETURN_IF_ERROR(CheckLayer(layer, queries));
    RETURN_IF_ERROR(CheckSelects(layer));
    if (selects_per_token_) return {Code::kInvalid, "the query tokens select for themselves"};
    for (const auto& [memory, name] :
         {std::pair<const void*, const char*>{pages.lists, "pages"}, {pages.lengths, "lengths"}}) {
      RETURN_IF_ERROR(CheckDevicePointer(memory, name, device_));
    }
    RETURN_IF_ERROR(BeginScores(layer, queries, AllTokens()));
    RETURN_IF_ERROR(LaunchPages(layer, rule, pages));
    RETURN_IF_ERROR(EndScores(layer, AllTokens()));
    return codes_.JoinSideStream(stream_);
  });
}

Status DeviceSteps::Locate(uint32_t layer, CacheUse cache_use) {
  const StepTables::Layer& tables = tables_.layer(layer);
  kernels::cuda::LocateRowsArgs args{.lane_capacity = lane_capacity_,
                                     .lanes = tables.row_lanes,
                                     .spans = tables.spans,
                                     .row_stride_bytes = row_bytes_,
                                     .positions = positions_,
                                     .position_stride = options_.selected_capacity,
                                     .counts = counts_,
                                     .addresses = addresses_,
                                     .address_stride = options_.selected_capacity,
                                     .row_counts = row_counts_};
  if (caches_) args.residency = caches_[layer].residency();
  if (cache_use == CacheUse::kReadsOnly) args.residency.touches = nullptr;
  if (staging_) {
    args.missed_rows = staging_->missed_rows();
    args.missed_counts = staging_->missed_counts();
  }
  const kernels::cuda::KernelStatus located = kernels::cuda::LocateRows(args, stream_);
  if (!located.ok()) return FromKernel(located, "looking up rows");
  return staging_ ? staging_->StageMissedRows(stream_, addresses_) : Status{};
}

// Attends with some query tokens of each item, or with logits of all of them, to the rows that
// Locate has found.
Status DeviceSteps::AttendLocated(const QueryTokens& tokens, float* lane_output, float* lane_lse,
                                  const uint32_t* row_ranges, const StepQueries* logits) {
  kernels::cuda::GivenLogits given;
  if (logits != nullptr) {
    given = {.data = static_cast<const std::byte*>(logits->data),
             .dtype = logits->dtype,
             .token_stride = logits->token_stride,
             .head_stride = logits->head_stride,
             .row_stride = logits->dim_stride,
             .seats = tables_.seats(),
             .kv_heads = options_.kv_heads};
  }
  return FromKernel(kernels::cuda::AttendRows({.shape = attend_shape(tokens.count),
                                               .scale = options_.scale,
                                               .queries = lane_queries_,
                                               .logits = given,
                                               .addresses = addresses_,
                                               .address_stride = options_.selected_capacity,
                                               .row_counts = row_counts_,
                                               .row_ranges = row_ranges,
                                               .output = lane_output,
                                               .lse = lane_lse,
                                               .scratch = attend_scratch_,
                                               .scratch_bytes = attend_scratch_bytes_},
                                              stream_),
                    "attending");
}

Status DeviceSteps::ArrangeOutputs(const QueryTokens& tokens, float* output, float* lse) {
  const size_t first = size_t{tokens.first} * options_.kv_heads * options_.group_size;
  return FromKernel(kernels::cuda::ArrangeOutputs({.shape = seat_shape(tokens.count),
                                                   .seats = tables_.seats(),
                                                   .value_dim = options_.value_dim,
                                                   .lane_output = lane_output_,
                                                   .lane_lse = lane_lse_,
                                                   .output = output + first * options_.value_dim,
                                                   .lse = lse == nullptr ? lse : lse + first},
                                                  stream_),
                    "arranging outputs");
}

// Attends with some query tokens of each item to the rows at their positions.
Status DeviceSteps::AttendTokens(uint32_t layer, const QueryTokens& tokens, float* output,
                                 float* lse, const StepQueries* logits) {
  RETURN_IF_ERROR(Locate(layer, CacheUse::kCounts));
  RETURN_IF_ERROR(AttendLocated(tokens, lane_output_, lane_lse_, nullptr, logits));
  return ArrangeOutputs(tokens, output, lse);
}

Status DeviceSteps::UpdateCache(uint32_t layer) {
  const StepTables::Layer& tables = tables_.layer(layer);
  Status status = caches_[layer].EndStep(stream_, tables.row_lanes, tables.spans);
  updated_[layer] = status.ok();
  return status;
}

// Checks what all attentions take, and makes the stream wait for the block cache.
Status DeviceSteps::BeginAttention(uint32_t layer, const StepQueries& queries, const float* output,
                                   const float* lse, CaptureId& capture) {
  RETURN_IF_ERROR(CheckLayer(layer, queries));
  for (const auto& [memory, name] : {std::pair{output, "output"}, {lse, "lse"}}) {
    RETURN_IF_ERROR(CheckDevicePointer(memory, name, device_));
  }
  RETURN_IF_ERROR(FindCapture(stream_, capture));
  if (capture.is_capturing && updated_[layer]) {
    return {Code::kInvalid, "layer " + std::to_string(layer) +
                                " was launched in this step before it is captured: capture in a "
                                "step of its own"};
  }
  // When a layer is attended twice in a step, the second read must wait for the cache update of the
  // first.
  return caches_ && updated_[layer] ? caches_[layer].BeginStep(stream_) : Status{};
}

Outcome DeviceSteps::Attend(uint32_t layer, const StepQueries& queries, kernels::GroupRule rule,
                            float* output, float* lse) {
  return OnDevice(options_.device, [&]() -> Status {
    CaptureId capture;
    RETURN_IF_ERROR(BeginAttention(layer, queries, output, lse, capture));
    if (kinds_[layer] != StepLayerKind::kSelected) {
      const bool is_full = kinds_[layer] == StepLayerKind::kFull;
      RETURN_IF_ERROR(
          AttendInParts(layer, queries, is_full ? FullCandidates(capture) : ItemRanges{}));
      return ArrangeOutputs(AllTokens(), output, lse);
    }
    for (uint32_t i = 0; i < selection_count(); ++i) {
      RETURN_IF_ERROR(SelectTokens(layer, queries, rule, TokensOf(i)));
      RETURN_IF_ERROR(AttendTokens(layer, TokensOf(i), output, lse));
    }
    RETURN_IF_ERROR(codes_.JoinSideStream(stream_));
    return !caches_ || capture.is_capturing ? Status{} : UpdateCache(layer);
  });
}

Status DeviceSteps::ArrangeLists(uint32_t layer, const StepLists& lists) {
  return FromKernel(
      kernels::cuda::ArrangeLists(
          {.shape = seat_shape(query_length_),
           .seats = tables_.seats(),
           .lists = lists.positions,
           .lengths = lists.lengths,
           .list_count = lists.list_count,
           .capacity = lists.capacity,
           .must_ascend = lists.logits != nullptr,
           .token_capacity = options_.token_capacity,
           .bits = list_bits_,
           .lane_positions = positions_,
           .lane_stride = options_.selected_capacity,
           .lane_counts = counts_,
           .refused_position = refused_element(layer, StepRefusal::Argument::kListPosition),
           .refused_length = refused_element(layer, StepRefusal::Argument::kListLength)},
          stream_),
      "arranging position lists");
}

Outcome DeviceSteps::AttendPositions(uint32_t layer, const StepQueries& queries,
                                     const StepLists& lists, float* output, float* lse) {
  return OnDevice(options_.device, [&]() -> Status {
    CaptureId capture;
    RETURN_IF_ERROR(
        BeginAttention(layer, lists.logits ? *lists.logits : queries, output, lse, capture));
    if (lists.list_count != 1 && lists.list_count != options_.kv_heads) {
      return OutOfRange("list_count", lists.list_count, "1 or kv_heads");
    }
    if (lists.capacity > options_.selected_capacity) {
      return OutOfRange("capacity", lists.capacity,
                        "at most selected_capacity, " + std::to_string(options_.selected_capacity));
    }
    if (lists.capacity > 0) {
      RETURN_IF_ERROR(CheckDevicePointer(lists.positions, "positions", device_));
    }
    if (lists.lengths != nullptr) {
      RETURN_IF_ERROR(CheckDevicePointer(lists.lengths, "lengths", device_));
    }
    if (!lists.logits) RETURN_IF_ERROR(ArrangeQueries(queries, AllTokens()));
    RETURN_IF_ERROR(ArrangeLists(layer, lists));
    RETURN_IF_ERROR(AttendTokens(layer, AllTokens(), output, lse, lists.logits));
    return !caches_ || capture.is_capturing ? Status{} : UpdateCache(layer);
  });
}

// Arranges the positions from the `first` one of each item's ranges on, as many as lanes have room
// for.
Status DeviceSteps::ArrangeRanges(const ItemRanges& ranges, uint64_t first) {
  return FromKernel(kernels::cuda::ArrangeRanges({.shape = seat_shape(query_length_),
                                                  .seats = tables_.seats(),
                                                  .ranges = ranges.ranges,
                                                  .ranges_per_item = ranges.count,
                                                  .first = first,
                                                  .lane_positions = positions_,
                                                  .lane_stride = options_.selected_capacity,
                                                  .lane_counts = counts_,
                                                  .refused_range = ranges.refused},
                                                 stream_),
                    "arranging ranges");
}

// Merges the attention of one part of the rows into that of the parts before.
Status DeviceSteps::AddPart(const QueryTokens& tokens) {
  return FromKernel(kernels::cuda::MergePartials(
                        {.query_count = lane_capacity_ * tokens.count * options_.group_size,
                         .value_dim = options_.value_dim,
                         .partial_count = 2,
                         .outputs = {lane_output_, part_output_},
                         .lses = {lane_lse_, part_lse_},
                         .output = lane_output_,
                         .lse = lane_lse_},
                        stream_),
                    "merging parts");
}

// Ranges may have more rows than a selection. They are attended to in parts of selected_capacity
// rows, as many as the longest item may need: an item that has no more rows adds nothing.
Status DeviceSteps::AttendInParts(uint32_t layer, const StepQueries& queries,
                                  const ItemRanges& ranges) {
  const QueryTokens tokens = AllTokens();
  RETURN_IF_ERROR(ArrangeQueries(queries, tokens));
  for (uint64_t first = 0; first == 0 || first < ranges.token_count;
       first += options_.selected_capacity) {
    RETURN_IF_ERROR(ArrangeRanges(ranges, first));
    RETURN_IF_ERROR(Locate(layer, CacheUse::kReadsOnly));
    if (first == 0) {
      RETURN_IF_ERROR(AttendLocated(tokens, lane_output_, lane_lse_));
    } else {
      RETURN_IF_ERROR(AttendLocated(tokens, part_output_, part_lse_));
      RETURN_IF_ERROR(AddPart(tokens));
    }
  }
  return {};
}

// Returns the candidates in layers of kind full.
DeviceSteps::ItemRanges DeviceSteps::FullCandidates(const CaptureId& capture) const {
  return {.ranges = tables_.full_ranges(),
          .count = options_.range_capacity,
          .token_count = capture.is_capturing ? options_.token_capacity : row_end_};
}

Outcome DeviceSteps::AttendRanges(uint32_t layer, const StepQueries& queries,
                                  const uint64_t* ranges, float* output, float* lse) {
  return OnDevice(options_.device, [&]() -> Status {
    CaptureId capture;
    RETURN_IF_ERROR(BeginAttention(layer, queries, output, lse, capture));
    RETURN_IF_ERROR(CheckDevicePointer(ranges, "ranges", device_));
    const ItemRanges of_items{
        .ranges = ranges,
        .count = 1,
        .token_count = capture.is_capturing ? options_.token_capacity : row_end_,
        .refused = refused_element(layer, StepRefusal::Argument::kRange)};
    RETURN_IF_ERROR(AttendInParts(layer, queries, of_items));
    return ArrangeOutputs(AllTokens(), output, lse);
  });
}

// Decode calls. The attention to the selection is merged with one to sink and window, whose rows
// are in the pool, among those of earlier steps that are not stored yet, and among those that the
// call brings.

// Reserves the memory that only steps that decode need, and forgets what the last step kept. The
// host writes to it, so the previous step's work must be done.
Status DeviceSteps::ReserveRecent() {
  RETURN_IF_ERROR(step_done_.Wait());
  if (kept_.data() == nullptr) {
    const size_t tokens = size_t{options_.layer_count} * lane_capacity_ * kRecentCapacity;
    RETURN_IF_ERROR(recent_.Allocate(tokens * row_bytes_));
    RETURN_IF_ERROR(kept_.Allocate(options_.layer_count * sizeof(uint32_t)));
  }
  std::memset(kept_.data(), 0, kept_.size_bytes());
  return {};
}

// Copies the rows of each item that are not stored to the places of its lanes.
void DeviceSteps::CopyRecent(const StepBatch& batch) {
  for (uint32_t item = 0; item < batch.count; ++item) {
    const StepOwn& own = batch.sequences[item].own;
    const size_t bytes = (own.query_position - own.stored_end) * row_bytes_;
    const std::byte* from = own.recent;
    for (uint32_t layer = 0; bytes > 0 && layer < options_.layer_count; ++layer) {
      const size_t first = size_t{layer} * lane_capacity_ + tables_.seat(item) * options_.kv_heads;
      for (uint32_t head = 0; head < options_.kv_heads; ++head, from += bytes) {
        std::memcpy(
            static_cast<std::byte*>(recent_.data()) + (first + head) * kRecentCapacity * row_bytes_,
            from, bytes);
      }
    }
  }
}

Status DeviceSteps::CheckDecode(uint32_t layer, const StepRows& rows) const {
  if (!decodes_) return {Code::kInvalid, "the step does not decode"};
  if (windows_[layer] + uint64_t{query_length_} - 1 > options_.selected_capacity) {
    return {Code::kInvalid, "layer " + std::to_string(layer) + " has a window of " +
                                std::to_string(windows_[layer]) +
                                " tokens, but selected_capacity is " +
                                std::to_string(options_.selected_capacity)};
  }
  for (const auto& [memory, name] : {std::pair{rows.keys, "keys"}, {rows.values, "values"}}) {
    RETURN_IF_ERROR(CheckDevicePointer(memory, name, device_));
  }
  return {};
}

// Packs the rows of the step's query tokens where the host finds them at the step's end. The device
// reads them there too: they are few.
Status DeviceSteps::KeepRows(uint32_t layer, const StepRows& rows) {
  using Argument = StepRefusal::Argument;
  return FromKernel(kernels::cuda::PackStepRows(
                        {.shape = seat_shape(query_length_),
                         .seats = tables_.seats(),
                         .rows = {.key_dim = options_.key_dim,
                                  .value_dim = options_.value_dim,
                                  .key = {.data = static_cast<const std::byte*>(rows.keys),
                                          .dtype = rows.key_dtype,
                                          .token_stride = rows.key_strides[0],
                                          .head_stride = rows.key_strides[1]},
                                  .value = {.data = static_cast<const std::byte*>(rows.values),
                                            .dtype = rows.value_dtype,
                                            .token_stride = rows.value_strides[0],
                                            .head_stride = rows.value_strides[1]},
                                  .row_dtype = options_.dtype,
                                  .rows = HostRows(layer),
                                  .head_stride_bytes = token_room() * row_bytes_,
                                  .row_stride_bytes = row_bytes_},
                         .packed = static_cast<uint32_t*>(kept_.data()) + layer,
                         .bad_key = refused_element(layer, Argument::kDecodedKey),
                         .bad_value = refused_element(layer, Argument::kDecodedValue)},
                        stream_),
                    "keeping rows");
}

// Finds the rows of sink and window, for some query tokens of each item.
Status DeviceSteps::LocateOwn(uint32_t layer, const QueryTokens& tokens) {
  const kernels::cuda::KernelStatus arranged =
      kernels::cuda::ArrangeOwnRows({.shape = seat_shape(tokens.count),
                                     .seats = tables_.seats(),
                                     .items = tables_.own_items(),
                                     .excluded = tables_.excluded(),
                                     .excluded_capacity = tables_.excluded_capacity(),
                                     .first_token = tokens.first,
                                     .window_tokens = windows_[layer],
                                     .lane_positions = positions_,
                                     .lane_stride = options_.selected_capacity,
                                     .lane_counts = counts_,
                                     .own_counts = own_counts_,
                                     .row_ranges = row_ranges_},
                                    stream_);
  if (!arranged.ok()) return FromKernel(arranged, "arranging sink and window");
  RETURN_IF_ERROR(Locate(layer, CacheUse::kReadsOnly));
  const size_t recent = size_t{layer} * lane_capacity_ * kRecentCapacity * row_bytes_;
  return FromKernel(
      kernels::cuda::AppendOwnRows({.shape = seat_shape(tokens.count),
                                    .seats = tables_.seats(),
                                    .items = tables_.own_items(),
                                    .lane_positions = positions_,
                                    .lane_stride = options_.selected_capacity,
                                    .lane_counts = counts_,
                                    .own_counts = own_counts_,
                                    .recent = static_cast<std::byte*>(recent_.data()) + recent,
                                    .recent_capacity = kRecentCapacity,
                                    .step_rows = HostRows(layer),
                                    .token_capacity = token_room(),
                                    .row_stride_bytes = row_bytes_,
                                    .addresses = addresses_,
                                    .row_counts = row_counts_},
                                   stream_),
      "looking up rows that are not stored");
}

// Attends to sink and window with some query tokens of each item, whose queries are arranged.
Status DeviceSteps::AttendToOwn(uint32_t layer, const QueryTokens& tokens, float* lane_output,
                                float* lane_lse) {
  RETURN_IF_ERROR(LocateOwn(layer, tokens));
  return AttendLocated(tokens, lane_output, lane_lse, row_ranges_);
}

// Attends to a selection, and to sink and window, with the query tokens that share the selection.
Status DeviceSteps::DecodeTokens(uint32_t layer, const StepQueries& queries,
                                 kernels::GroupRule rule, const QueryTokens& tokens) {
  RETURN_IF_ERROR(SelectTokens(layer, queries, rule, tokens));
  RETURN_IF_ERROR(Locate(layer, CacheUse::kCounts));
  RETURN_IF_ERROR(AttendLocated(tokens, lane_output_, lane_lse_));
  RETURN_IF_ERROR(AttendToOwn(layer, tokens, part_output_, part_lse_));
  return AddPart(tokens);
}

Outcome DeviceSteps::Decode(uint32_t layer, const StepQueries& queries, const StepRows& rows,
                            kernels::GroupRule rule, float* output, float* lse) {
  return OnDevice(options_.device, [&]() -> Status {
    CaptureId capture;
    RETURN_IF_ERROR(BeginAttention(layer, queries, output, lse ? lse : output, capture));
    RETURN_IF_ERROR(CheckDecode(layer, rows));
    RETURN_IF_ERROR(KeepRows(layer, rows));
    if (kinds_[layer] != StepLayerKind::kSelected) {
      const QueryTokens all = AllTokens();
      if (kinds_[layer] == StepLayerKind::kFull) {
        RETURN_IF_ERROR(AttendInParts(layer, queries, FullCandidates(capture)));
        RETURN_IF_ERROR(AttendToOwn(layer, all, part_output_, part_lse_));
        RETURN_IF_ERROR(AddPart(all));
      } else {
        RETURN_IF_ERROR(ArrangeQueries(queries, all));
        RETURN_IF_ERROR(AttendToOwn(layer, all, lane_output_, lane_lse_));
      }
      return ArrangeOutputs(all, output, lse);
    }
    for (uint32_t i = 0; i < selection_count(); ++i) {
      RETURN_IF_ERROR(DecodeTokens(layer, queries, rule, TokensOf(i)));
      RETURN_IF_ERROR(ArrangeOutputs(TokensOf(i), output, lse));
    }
    RETURN_IF_ERROR(codes_.JoinSideStream(stream_));
    return !caches_ || capture.is_capturing ? Status{} : UpdateCache(layer);
  });
}

const void* DeviceSteps::Kept(uint32_t layer) const {
  if (!decodes_ || layer >= options_.layer_count) return nullptr;
  return static_cast<const uint32_t*>(kept_.data())[layer] != 0 ? HostRows(layer) : nullptr;
}

// Returns where the kernels of a layer note an element of an argument that is out of range.
kernels::cuda::RefusedElement DeviceSteps::refused_element(uint32_t layer,
                                                           StepRefusal::Argument argument) const {
  return {static_cast<unsigned long long*>(refused_.data()) + static_cast<size_t>(argument), layer};
}

void DeviceSteps::ClearRefused() { std::memset(refused_.data(), 0, refused_.size_bytes()); }

StepRefusal DeviceSteps::Refused() const {
  const auto* noted = static_cast<const unsigned long long*>(refused_.data());
  for (size_t argument = 1; argument < kRefusedArguments; ++argument) {
    if (noted[argument] == 0) continue;
    const unsigned long long element = noted[argument] - 1;
    return {.argument = static_cast<StepRefusal::Argument>(argument),
            .layer = static_cast<uint32_t>(element >> kernels::cuda::kRefusedTagShift),
            .element = element & ((1ULL << kernels::cuda::kRefusedTagShift) - 1)};
  }
  return {};
}

}  // namespace pqcached::gpu

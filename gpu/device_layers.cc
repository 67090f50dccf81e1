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

// Selects for some query tokens of each item. Called for the tokens of a step in order.
Status DeviceSteps::SelectTokens(uint32_t layer, const StepQueries& queries,
                                 kernels::GroupRule rule, const QueryTokens& tokens) {
  RETURN_IF_ERROR(ArrangeQueries(queries, tokens));
  const StepTables::Layer& tables = tables_.layer(layer);
  const uint32_t queries_of_lane = tokens.count * options_.group_size;
  const uint32_t table_capacity = lane_capacity_ * options_.codebook_capacity;
  kernels::cuda::KernelStatus status = kernels::cuda::BuildTables({.geometry = options_.geometry,
                                                                   .group_size = queries_of_lane,
                                                                   .scale = options_.scale,
                                                                   .task_capacity = table_capacity,
                                                                   .tasks = tables.tasks,
                                                                   .tables = score_tables_},
                                                                  stream_);
  if (!status.ok()) return FromKernel(status, "building score tables");
  if (tokens.first == 0) {
    RETURN_IF_ERROR(codes_.BeginLayer(stream_, tables_.code_layer(layer)));
  }
  status = kernels::cuda::PqSelect(
      {.geometry = options_.geometry,
       .group_size = queries_of_lane,
       .rule = rule,
       .candidates = {.lane_capacity = lane_capacity_,
                      .chunk_capacity = lane_capacity_ * tables_.chunk_capacity(),
                      .lanes = tables.select_lanes,
                      .chunks = tables.chunks},
       .table_capacity = table_capacity,
       .tables = score_tables_,
       .selection = {.positions = positions_,
                     .position_stride = options_.selected_capacity,
                     .counts = counts_},
       .scratch = select_scratch_,
       .scratch_bytes = select_scratch_bytes_},
      stream_);
  if (!status.ok()) return FromKernel(status, "selecting");
  const bool is_last = tokens.first + tokens.count == query_length_;
  return is_last ? codes_.EndLayer(stream_, tables_.code_layer(layer)) : Status{};
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

// Attends with some query tokens of each item to the rows that Locate has found.
Status DeviceSteps::AttendLocated(const QueryTokens& tokens, float* lane_output, float* lane_lse) {
  return FromKernel(kernels::cuda::AttendRows({.shape = attend_shape(tokens.count),
                                               .scale = options_.scale,
                                               .queries = lane_queries_,
                                               .addresses = addresses_,
                                               .address_stride = options_.selected_capacity,
                                               .row_counts = row_counts_,
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
                                                   .lse = lse + first},
                                                  stream_),
                    "arranging outputs");
}

// Attends with some query tokens of each item to the rows at their positions.
Status DeviceSteps::AttendTokens(uint32_t layer, const QueryTokens& tokens, float* output,
                                 float* lse) {
  RETURN_IF_ERROR(Locate(layer, CacheUse::kCounts));
  RETURN_IF_ERROR(AttendLocated(tokens, lane_output_, lane_lse_));
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
    if (kinds_[layer] == StepLayerKind::kFull) {
      const ItemRanges candidates{
          .ranges = tables_.full_ranges(),
          .count = options_.range_capacity,
          .token_count = capture.is_capturing ? options_.token_capacity : row_end_};
      return AttendInParts(layer, queries, candidates, output, lse);
    }
    if (kinds_[layer] == StepLayerKind::kWindow) {
      return AttendInParts(layer, queries, {}, output, lse);
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
    RETURN_IF_ERROR(BeginAttention(layer, queries, output, lse, capture));
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
    RETURN_IF_ERROR(ArrangeQueries(queries, AllTokens()));
    RETURN_IF_ERROR(ArrangeLists(layer, lists));
    RETURN_IF_ERROR(AttendTokens(layer, AllTokens(), output, lse));
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
                                  const ItemRanges& ranges, float* output, float* lse) {
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
  return ArrangeOutputs(tokens, output, lse);
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
    return AttendInParts(layer, queries, of_items, output, lse);
  });
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

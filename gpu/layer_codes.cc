#include "gpu/layer_codes.h"
#include "kernels/base/status_macros.h"

#include <algorithm>
#include <string>

namespace pqcached::gpu {
namespace {

using kernels::cuda::Stream;

constexpr uint32_t kMaxLayers = 1024;
constexpr uint32_t kMaxRanges = 65535;
constexpr size_t kAlignment = 256;

Status Check(const LayerCodes::Options& options, size_t layer_stride_bytes) {
  if (options.layer_count < 1 || options.layer_count > kMaxLayers) {
    return {Code::kInvalid, "layer_count must be 1 to 1024"};
  }
  if (options.layer_capacity_bytes < 1) {
    return {Code::kInvalid, "layer_capacity_bytes must be at least 1"};
  }
  if (options.range_capacity < 1 || options.range_capacity > kMaxRanges) {
    return {Code::kInvalid, "range_capacity must be 1 to 65535"};
  }
  const size_t least = std::min(options.layer_count, 2u) * layer_stride_bytes;
  if (options.codes_bytes != 0 && options.codes_bytes < least) {
    return {Code::kInvalid, "codes_bytes must be 0 or at least " + std::to_string(least) +
                                ", two layers of codes, not " +
                                std::to_string(options.codes_bytes)};
  }
  return {};
}

}  // namespace

Status LayerCodes::Create(const Options& options) {
  layer_stride_bytes_ = (options.layer_capacity_bytes + kAlignment - 1) / kAlignment * kAlignment;
  RETURN_IF_ERROR(Check(options, layer_stride_bytes_));
  options_ = options;
  const size_t fitting = options.codes_bytes / layer_stride_bytes_;
  const bool all_resident = options.codes_bytes == 0 || fitting >= options.layer_count;
  resident_count_ =
      all_resident ? options.layer_count : static_cast<uint32_t>(fitting - kSlotCount);
  const size_t held = all_resident ? resident_count_ : resident_count_ + kSlotCount;
  RETURN_IF_ERROR(memory_.Allocate(held * layer_stride_bytes_));
  RETURN_IF_ERROR(side_stream_.Create());
  RETURN_IF_ERROR(slot_free_.Create());
  for (OwnedEvent& filled : slot_filled_) {
    RETURN_IF_ERROR(filled.Create());
  }
  return {};
}

std::byte* LayerCodes::Memory(uint32_t layer) const {
  const size_t place = IsResident(layer) ? layer : resident_count_ + SlotOf(layer);
  return static_cast<std::byte*>(memory_.data()) + place * layer_stride_bytes_;
}

Status LayerCodes::BeginStep(const kernels::cuda::ByteRange* ranges) {
  ranges_ = ranges;
  slots_ = {};
  last_capture_ = {};
  forked_slot_ = kSlotCount;
  return {};
}

bool LayerCodes::HasUncapturedPrefetch() const {
  return std::ranges::any_of(slots_, [](const Slot& slot) {
    return slot.layer != kNoLayer && !slot.capture.is_capturing;
  });
}

Status LayerCodes::BeginLayer(Stream stream, uint32_t layer) {
  if (resident_count_ == options_.layer_count) return {};
  CaptureId capture;
  RETURN_IF_ERROR(FindCapture(stream, capture));
  if (capture.is_capturing) return BeginCaptured(stream, layer, capture);
  if (captured_) return IsResident(layer) ? Status() : Copy(stream, layer);
  if (IsResident(layer)) return PrefetchNextLayers(stream, layer);
  if (!Holds(layer, capture)) {
    RETURN_IF_ERROR(Prefetch(stream, layer, capture));
  }
  return slot_filled_[SlotOf(layer)].MakeWait(stream);
}

Status LayerCodes::BeginCaptured(Stream stream, uint32_t layer, const CaptureId& capture) {
  if (HasUncapturedPrefetch()) {
    return {Code::kInvalid,
            "layers of this step were launched before one is captured, and codes are still brought "
            "for them: "
            "capture in a step of its own"};
  }
  captured_ = true;
  const bool is_same_capture = capture == last_capture_;
  last_capture_ = capture;
  if (!IsResident(layer) && !Holds(layer, capture)) {
    RETURN_IF_ERROR(Copy(stream, layer));
    slots_[SlotOf(layer)] = {layer, capture};
  }
  const uint32_t next = layer + 1;
  if (!is_same_capture || next >= options_.layer_count || IsResident(next) ||
      Holds(next, capture)) {
    return {};
  }
  forked_slot_ = SlotOf(next);
  return Prefetch(stream, next, capture);
}

Status LayerCodes::EndLayer(Stream stream, uint32_t layer) {
  if (IsResident(layer) || captured_) return {};
  return PrefetchNextLayers(stream, layer);
}

Status LayerCodes::JoinSideStream(Stream stream) {
  if (forked_slot_ == kSlotCount) return {};
  const OwnedEvent& filled = slot_filled_[forked_slot_];
  forked_slot_ = kSlotCount;
  return filled.MakeWait(stream);
}

Status LayerCodes::EndStep(Stream stream) {
  for (uint32_t slot = 0; slot < kSlotCount; ++slot) {
    if (slots_[slot].layer == kNoLayer || slots_[slot].capture.is_capturing) continue;
    RETURN_IF_ERROR(slot_filled_[slot].MakeWait(stream));
  }
  slots_ = {};
  return {};
}

Status LayerCodes::Copy(Stream stream, uint32_t layer) {
  const size_t first = size_t{layer - resident_count_} * options_.range_capacity;
  return FromKernel(
      kernels::cuda::CopyRanges(
          {.range_capacity = options_.range_capacity, .ranges = ranges_ + first}, stream),
      "copying codes");
}

Status LayerCodes::Prefetch(Stream stream, uint32_t layer, const CaptureId& capture) {
  RETURN_IF_ERROR(slot_free_.Record(stream));
  RETURN_IF_ERROR(slot_free_.MakeWait(side_stream_.get()));
  RETURN_IF_ERROR(Copy(side_stream_.get(), layer));
  slots_[SlotOf(layer)] = {layer, capture};
  return slot_filled_[SlotOf(layer)].Record(side_stream_.get());
}

// Prefetches the next two layers into their slots. A layer that shares its slot with `layer` is
// copied only when `stream` has finished reading that slot.
Status LayerCodes::PrefetchNextLayers(Stream stream, uint32_t layer) {
  const uint32_t first = std::max(layer + 1, resident_count_);
  const uint32_t end = std::min(first + kSlotCount, options_.layer_count);
  for (uint32_t next = first; next < end; ++next) {
    if (Holds(next, {})) continue;
    RETURN_IF_ERROR(Prefetch(stream, next, {}));
  }
  return {};
}

}  // namespace pqcached::gpu

#include "gpu/layer_codes.h"

#include <algorithm>
#include <string>

namespace pqcached::gpu {
namespace {

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
  if (options.budget_bytes < least) {
    return {Code::kInvalid, "budget_bytes must be at least " + std::to_string(least) +
                                ", two layers of codes, not " +
                                std::to_string(options.budget_bytes)};
  }
  return {};
}

}  // namespace

Status LayerCodes::Create(const Options& options) {
  layer_stride_bytes_ = (options.layer_capacity_bytes + kAlignment - 1) / kAlignment * kAlignment;
  if (Status status = Check(options, layer_stride_bytes_); !status.ok()) return status;
  options_ = options;
  const size_t fitting = options.budget_bytes / layer_stride_bytes_;
  const bool all_resident = fitting >= options.layer_count;
  resident_count_ =
      all_resident ? options.layer_count : static_cast<uint32_t>(fitting - kSlotCount);
  const size_t held = all_resident ? resident_count_ : resident_count_ + kSlotCount;
  if (Status status = memory_.Allocate(held * layer_stride_bytes_); !status.ok()) return status;
  if (Status status = side_stream_.Create(); !status.ok()) return status;
  if (Status status = slot_free_.Create(); !status.ok()) return status;
  for (OwnedEvent& filled : slot_filled_) {
    if (Status status = filled.Create(); !status.ok()) return status;
  }
  return {};
}

std::byte* LayerCodes::Memory(uint32_t layer) const {
  const size_t place = IsResident(layer) ? layer : resident_count_ + SlotOf(layer);
  return static_cast<std::byte*>(memory_.data()) + place * layer_stride_bytes_;
}

Status LayerCodes::BeginStep(kernels::cuda::Stream stream, const kernels::cuda::ByteRange* ranges) {
  ranges_ = ranges;
  // First those that take longest.
  const uint32_t last = std::min(options_.layer_count, resident_count_ + kSlotCount);
  for (uint32_t layer = resident_count_; layer < last; ++layer) {
    if (Status status = Prefetch(stream, layer); !status.ok()) return status;
  }
  for (uint32_t layer = 0; layer < resident_count_;) {
    const uint32_t count =
        std::min(resident_count_ - layer, std::max(1u, kMaxRanges / options_.range_capacity));
    if (Status status = Copy(stream, layer, count); !status.ok()) return status;
    layer += count;
  }
  return {};
}

Status LayerCodes::BeginLayer(kernels::cuda::Stream stream, uint32_t layer) {
  return IsResident(layer) ? Status() : slot_filled_[SlotOf(layer)].MakeWait(stream);
}

Status LayerCodes::EndLayer(kernels::cuda::Stream stream, uint32_t layer) {
  const uint32_t next = layer + kSlotCount;
  if (IsResident(layer) || next >= options_.layer_count) return {};
  return Prefetch(stream, next);
}

Status LayerCodes::Copy(kernels::cuda::Stream stream, uint32_t first_layer, uint32_t layer_count) {
  return FromKernel(
      kernels::cuda::CopyRanges({.range_capacity = layer_count * options_.range_capacity,
                                 .ranges = ranges_ + size_t{first_layer} * options_.range_capacity},
                                stream),
      "copying codes");
}

Status LayerCodes::Prefetch(kernels::cuda::Stream stream, uint32_t layer) {
  if (Status status = slot_free_.Record(stream); !status.ok()) return status;
  if (Status status = slot_free_.MakeWait(side_stream_.get()); !status.ok()) return status;
  if (Status status = Copy(side_stream_.get(), layer, 1); !status.ok()) return status;
  return slot_filled_[SlotOf(layer)].Record(side_stream_.get());
}

}  // namespace pqcached::gpu

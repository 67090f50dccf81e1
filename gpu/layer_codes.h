// LayerCodes: where the codes of all layers are read in device memory: resident as far as a budget goes, the rest copied
// one layer ahead of its use, in every step.
//
// The first layers are resident: whoever has new codes of theirs copies them to Memory. The others share two slots by
// turns: while a layer is computed from one slot, a side stream fills the other with the next layer, from page-locked memory.
// Where a layer's codes are to be found never changes, so that chunk tables (kernels/cuda/select.h) name fixed addresses.
//
// A step: BeginStep; for layers, once or more, in order for speed: BeginLayer, work that reads the codes, EndLayer, other
// work of the layer, LeaveLayer; EndStep. Layers may be captured in graphs, one by one or together. A graph brings what its layers
// read, because who replays it is not known: one layer ahead from the second layer of a graph on, and joined within LeaveLayer,
// because a graph may end there. Replays may use the slots at any time, so from the first capture on, layers that are
// launched bring their own codes, on their own stream.
//
// Thread-compatible; one stream at a time.
#ifndef PQCACHED_GPU_LAYER_CODES_H_
#define PQCACHED_GPU_LAYER_CODES_H_

#include <array>
#include <cstddef>
#include <cstdint>

#include "gpu/device.h"
#include "gpu/status.h"
#include "kernels/cuda/copy.h"

namespace pqcached::gpu {

class LayerCodes {
 public:
  struct Options {
    uint32_t layer_count = 0;         // 1 to 1024
    size_t layer_capacity_bytes = 0;  // codes of one layer, of all sequences and kv heads
    size_t codes_bytes = 0;           // of device memory: at least two layers; 0: all
    uint32_t range_capacity = 0;      // copies of one layer in one step, 1 to 65535
  };

  LayerCodes() = default;

  // Allocates. Called once.
  //
  // Errors: kInvalid      an option is out of range (the message names it and the range)
  //         kOutOfMemory  of device memory
  Status Create(const Options& options);

  uint32_t resident_layer_count() const { return resident_count_; }
  bool IsResident(uint32_t layer) const { return layer < resident_count_; }

  // Where the codes of a layer begin, [layer_capacity_bytes]: those of a resident layer are there always, and of another one
  // between BeginLayer and EndLayer.
  std::byte* Memory(uint32_t layer) const;

  // `ranges` is a table in device memory, [layers that are not resident, range_capacity]: all codes of each, from
  // page-locked memory to Memory. Both stay as they are until the step is done, and where they are for graphs.
  Status BeginStep(const kernels::cuda::ByteRange* ranges);

  // `stream` goes on when the codes of the layer are there.
  //
  // Errors: kInvalid  the stream captures, and layers of this step were launched before
  Status BeginLayer(kernels::cuda::Stream stream, uint32_t layer);

  // Everything that reads the layer's codes has been given to `stream`: the slot goes to the layer after the next.
  Status EndLayer(kernels::cuda::Stream stream, uint32_t layer);

  // The last of the layer's work has been given to `stream`.
  Status LeaveLayer(kernels::cuda::Stream stream);

  // `stream` goes on when everything that was brought is there, used or not: the memory that it came from may change
  // behind it.
  Status EndStep(kernels::cuda::Stream stream);

  size_t device_bytes() const { return memory_.size_bytes(); }

 private:
  static constexpr uint32_t kSlotCount = 2;
  static constexpr uint32_t kNoLayer = UINT32_MAX;

  // What a slot holds, or will hold when its event is done.
  struct Slot {
    uint32_t layer = kNoLayer;
    CaptureId capture;  // for whom
  };

  uint32_t SlotOf(uint32_t layer) const { return (layer - resident_count_) % kSlotCount; }
  bool Holds(uint32_t layer, const CaptureId& capture) const {
    const Slot& slot = slots_[SlotOf(layer)];
    return slot.layer == layer && slot.capture == capture;
  }
  bool IsAhead() const;
  Status BeginCaptured(kernels::cuda::Stream stream, uint32_t layer, const CaptureId& capture);
  Status Copy(kernels::cuda::Stream stream, uint32_t layer);
  // Fills the layer's slot on the side stream, once what `stream` has been given is done.
  Status Prefetch(kernels::cuda::Stream stream, uint32_t layer, const CaptureId& capture);
  Status PrefetchBehind(kernels::cuda::Stream stream, uint32_t layer);

  Options options_;
  size_t layer_stride_bytes_ = 0;
  uint32_t resident_count_ = 0;
  DeviceBuffer memory_;  // [resident_count_ (+ kSlotCount), layer_stride_bytes_]
  const kernels::cuda::ByteRange* ranges_ = nullptr;  // of the step
  OwnedStream side_stream_;
  OwnedEvent slot_free_;
  std::array<OwnedEvent, kSlotCount> slot_filled_;
  std::array<Slot, kSlotCount> slots_;  // of the step
  CaptureId last_capture_;              // that a layer was in
  bool captured_ = false;               // some layer, ever
  uint32_t forked_slot_ = kSlotCount;   // filled beside a layer that is captured
};

}  // namespace pqcached::gpu

#endif  // PQCACHED_GPU_LAYER_CODES_H_

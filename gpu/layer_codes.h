// LayerCodes provides the PQ codes of all layers in device memory. As many layers as the budget
// allows are resident; the others are copied one layer ahead of their use, in every step.
//
// The first layers are resident: the caller copies new codes of these layers to Memory. The other
// layers alternate between two slots: while a layer is computed from one slot, a side stream copies
// the next layer from page-locked host memory into the other. The address of a layer's codes never
// changes, so chunk tables (kernels/cuda/select/select.h) can contain fixed addresses.
//
// The order of calls in a step is: BeginStep; for each layer, once or more, fastest in ascending
// order: BeginLayer, the work that reads the codes, EndLayer, the other work of the layer,
// JoinSideStream; then EndStep. Layers may be captured in graphs, one by one or together. A graph
// copies the codes that its layers read, because it cannot rely on anything outside of it when it
// is replayed. From the second layer of a graph on, the codes are copied one layer ahead, and the
// side stream is joined in JoinSideStream, because the graph may end there. Replays may use the
// slots at any time, so after the first capture, layers launched outside of graphs copy their own
// codes on their own stream.
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
    size_t layer_capacity_bytes = 0;  // codes of one layer, for all sequences and kv heads
    size_t codes_bytes = 0;           // device memory for codes: at least two layers; 0: all layers
    uint32_t range_capacity = 0;      // copies of one layer in one step, 1 to 65535
  };

  LayerCodes() = default;

  // Allocates the memory. Called once.
  //
  // Errors: kInvalid      an option is out of range (the message names it and the range)
  //         kOutOfMemory  the device has too little free memory
  Status Create(const Options& options);

  uint32_t resident_layer_count() const { return resident_count_; }
  bool IsResident(uint32_t layer) const { return layer < resident_count_; }

  // Returns the address of a layer's codes, [layer_capacity_bytes]. The codes of a resident layer
  // are always valid, those of another layer only between BeginLayer and EndLayer.
  std::byte* Memory(uint32_t layer) const;

  // Begins a step. `ranges` is a table in device memory, [layers that are not resident,
  // range_capacity], which lists all copies of each layer from page-locked memory to Memory. The
  // table and the memory that it names must not change until the step is done, and graphs require
  // them to stay at the same addresses.
  Status BeginStep(const kernels::cuda::ByteRange* ranges);

  // Makes `stream` wait until the codes of the layer are on the device.
  //
  // Errors: kInvalid  the stream captures, and layers of this step were launched before the capture
  Status BeginLayer(kernels::cuda::Stream stream, uint32_t layer);

  // Called when all work that reads the layer's codes is enqueued on `stream`: reuses the layer's
  // slot for the layer after the next.
  Status EndLayer(kernels::cuda::Stream stream, uint32_t layer);

  // Called when all work of the layer is enqueued on `stream`.
  Status JoinSideStream(kernels::cuda::Stream stream);

  // Makes `stream` wait for all copies of the step, used or not. Work enqueued on it afterwards may
  // change the source memory.
  Status EndStep(kernels::cuda::Stream stream);

  size_t device_bytes() const { return memory_.size_bytes(); }

 private:
  static constexpr uint32_t kSlotCount = 2;
  static constexpr uint32_t kNoLayer = UINT32_MAX;

  // Content of a slot, valid once the slot's event is done.
  struct Slot {
    uint32_t layer = kNoLayer;
    CaptureId capture;  // the graph that copied the codes
  };

  uint32_t SlotOf(uint32_t layer) const { return (layer - resident_count_) % kSlotCount; }
  bool Holds(uint32_t layer, const CaptureId& capture) const {
    const Slot& slot = slots_[SlotOf(layer)];
    return slot.layer == layer && slot.capture == capture;
  }
  bool HasUncapturedPrefetch() const;
  Status BeginCaptured(kernels::cuda::Stream stream, uint32_t layer, const CaptureId& capture);
  Status Copy(kernels::cuda::Stream stream, uint32_t layer);
  // Copies the layer's codes into its slot on the side stream, after all work enqueued on `stream`
  // so far.
  Status Prefetch(kernels::cuda::Stream stream, uint32_t layer, const CaptureId& capture);
  Status PrefetchNextLayers(kernels::cuda::Stream stream, uint32_t layer);

  Options options_;
  size_t layer_stride_bytes_ = 0;
  uint32_t resident_count_ = 0;
  DeviceBuffer memory_;  // [resident_count_ (+ kSlotCount), layer_stride_bytes_]
  const kernels::cuda::ByteRange* ranges_ = nullptr;  // table of the current step
  OwnedStream side_stream_;
  OwnedEvent slot_free_;
  std::array<OwnedEvent, kSlotCount> slot_filled_;
  std::array<Slot, kSlotCount> slots_;  // contents in the current step
  CaptureId last_capture_;              // capture that contained the last captured layer
  bool captured_ = false;               // true after the first capture
  uint32_t forked_slot_ = kSlotCount;   // slot filled on the side stream during a captured layer
};

}  // namespace pqcached::gpu

#endif  // PQCACHED_GPU_LAYER_CODES_H_

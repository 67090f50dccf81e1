// LayerCodes: the codes of all layers as selections read them, in device memory: resident as far as a budget goes, the rest
// copied one layer ahead of its use.
//
// The first layers are resident. The others share two slots by turns: while a layer is computed from one slot, a side
// stream fills the other with the next layer, straight from the page-locked mapping. Where a layer's codes are to be found
// never changes, so that chunk tables (kernels/cuda/select.h) name fixed addresses, and a step can be captured in a graph.
//
// A step: BeginStep, then for every layer, in order, BeginLayer, work, EndLayer. Thread-compatible; one stream at a time.
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
    size_t budget_bytes = 0;          // of device memory: all layers, or at least two
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

  // Where the codes of a layer begin, [layer_capacity_bytes]: what ranges are copied to, and what is read between
  // BeginLayer and EndLayer.
  std::byte* Memory(uint32_t layer) const;

  // Starts to bring codes. `ranges` is a table in device memory, [layer_count, range_capacity], that stays as it is
  // until the step is done: for a resident layer what is new since the last step, for another one all of its codes.
  Status BeginStep(kernels::cuda::Stream stream, const kernels::cuda::ByteRange* ranges);

  // `stream` goes on when the codes of the layer are there.
  Status BeginLayer(kernels::cuda::Stream stream, uint32_t layer);

  // Everything that reads the layer's codes has been given to `stream`: the slot goes to the layer after the next.
  Status EndLayer(kernels::cuda::Stream stream, uint32_t layer);

  size_t device_bytes() const { return memory_.size_bytes(); }

 private:
  static constexpr uint32_t kSlotCount = 2;

  uint32_t SlotOf(uint32_t layer) const { return (layer - resident_count_) % kSlotCount; }
  Status Copy(kernels::cuda::Stream stream, uint32_t first_layer, uint32_t layer_count);
  // Fills the layer's slot on the side stream, once what `stream` has been given is done.
  Status Prefetch(kernels::cuda::Stream stream, uint32_t layer);

  Options options_;
  size_t layer_stride_bytes_ = 0;
  uint32_t resident_count_ = 0;
  DeviceBuffer memory_;  // [resident_count_ (+ kSlotCount), layer_stride_bytes_]
  const kernels::cuda::ByteRange* ranges_ = nullptr;  // of the step
  OwnedStream side_stream_;
  OwnedEvent slot_free_;
  std::array<OwnedEvent, kSlotCount> slot_filled_;
};

}  // namespace pqcached::gpu

#endif  // PQCACHED_GPU_LAYER_CODES_H_

// StepTables writes the device tables that the kernels of a step read, and assigns seats to
// sequences.
//
// The host writes an image in page-locked memory, and one copy uploads it to the device between
// steps. For each seat and layer the class remembers what it has described: codes and centroids are
// copied once, when their tokens first become candidates, in batches as large as the engine's
// window; spans of rows change equally rarely. Rows are described apart from codes, because steps
// without a selection read rows only. State that was rolled back or has moved is invalidated here
// and in the block cache.
//
// Codes of resident layers (LayerCodes) are copied to the device. Codes of other layers are copied
// to page-locked memory of this class in the layout of the device. A plane is therefore one range
// of bytes, even when it spans several segments and when the pool itself cannot be page-locked.
//
// Thread-compatible.
#ifndef PQCACHED_GPU_STEP_TABLES_H_
#define PQCACHED_GPU_STEP_TABLES_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "gpu/block_cache.h"
#include "gpu/device.h"
#include "gpu/layer_codes.h"
#include "gpu/page_lock.h"
#include "gpu/steps.h"
#include "kernels/cuda/copy.h"
#include "kernels/cuda/rows.h"
#include "kernels/cuda/select/pq_table.h"
#include "kernels/cuda/select/select.h"
#include "kernels/cuda/step/own_rows.h"
#include "kernels/cuda/step/pages.h"
#include "kernels/cuda/step/seats.h"

namespace pqcached::gpu {

class StepTables {
 public:
  // Tables of one layer. Device addresses that do not change between steps.
  struct Layer {
    // Of layers with an index.
    kernels::cuda::SelectLane* select_lanes = nullptr;  // [lanes]
    kernels::cuda::SelectChunk* chunks = nullptr;       // [lanes, chunk_capacity]
    kernels::cuda::TableTask* tasks = nullptr;          // [lanes, codebook_capacity]
    uint8_t* planes = nullptr;   // [lanes, planes, plane_stride]; slots are positions
    float* centroids = nullptr;  // [lanes, codebook_capacity, floats of a codebook]
    // Of all layers.
    kernels::cuda::RowLane* row_lanes = nullptr;    // [lanes]
    kernels::cuda::DeviceRowSpan* spans = nullptr;  // [lanes, span_capacity]
  };

  // The memory that rows are read from, and the objects that depend on it.
  struct Rows {
    PageLock* page_lock = nullptr;  // rows that it cannot lock are read by the host only
    const std::byte* pool = nullptr;
    BlockCache* caches = nullptr;  // [layers], or null
  };

  // Allocates memory for `options`, which must be valid. `lane_queries` is the device address of
  // the lanes' queries and `codes` provides the addresses of the codes; both must outlive this
  // object.
  // Errors: kOutOfMemory
  Status Create(const StepsOptions& options, const LayerCodes& codes, const float* lane_queries);
  // Returns the options for LayerCodes::Create.
  static LayerCodes::Options CodesOptions(const StepsOptions& options);

  // Assigns seats to the sequences of the batch and writes and uploads the tables. Called while
  // `caches` are between BeginStep and EndStep. An error may leave some sequences described; the
  // caller has nothing to undo.
  //
  // REQUIRES: when some layers are not resident, no copy of the previous step's codes is in
  //           progress.
  // Errors: as Steps::Begin
  Status Update(const StepBatch& batch, const Rows& rows, kernels::cuda::Stream stream);
  // Returns true once any span was described whose rows the host has to copy.
  bool has_host_only_rows() const { return has_host_only_rows_; }
  // Discards all descriptions. The caller must invalidate the block caches too.
  void InvalidateAll();

  const kernels::cuda::SeatItem* seats() const { return device_.seats; }
  // Candidates in layers of kind full, [items, range_capacity, 2].
  const uint64_t* full_ranges() const { return device_.full_ranges; }
  // Sinks and windows of the items of a step that decodes, [seats], those by which pages are
  // listed, [seats], and the positions that these do not have, [excluded_capacity].
  const kernels::cuda::OwnItem* own_items() const { return device_.own_items; }
  const kernels::cuda::PageItem* page_items() const { return device_.page_items; }
  const kernels::cuda::OwnRange* excluded() const { return device_.excluded; }
  uint32_t excluded_capacity() const { return options_.range_capacity - 1; }
  // The seat of an item of the batch.
  uint32_t seat(uint32_t item) const { return item_seats_[item]; }
  // Layers with an index, and the number of such a layer among them, for LayerCodes.
  uint32_t code_layer_count() const { return code_layer_count_; }
  uint32_t code_layer(uint32_t layer) const { return code_layers_[layer]; }
  bool has_index(uint32_t layer) const { return code_layers_[layer] != kNoIndex; }
  // Copies of the codes of non-resident layers, for LayerCodes.
  const kernels::cuda::ByteRange* code_ranges() const { return device_.code_ranges; }
  const Layer& layer(uint32_t layer) const { return device_.layers[layer]; }
  uint32_t chunk_capacity() const { return chunk_capacity_; }
  size_t device_bytes() const { return memory_.size_bytes(); }

 private:
  // Identity of a codebook when it was described: a change of any field means another codebook.
  struct Codebook {
    const float* centroids = nullptr;
    uint32_t codebook_generation = 0;
    uint32_t first_position = 0;
    uint32_t paired_dims = 0;
    friend bool operator==(const Codebook&, const Codebook&) = default;
  };
  struct Span {
    const std::byte* rows = nullptr;  // rows of the first head
    uint32_t first_position = 0;
    uint32_t token_count = 0;
    uint32_t first_block = 0;
    // Of spans that begin below Described::coded.
    const uint8_t* planes = nullptr;
    Codebook codebook;
  };
  struct Described {
    uint32_t tokens = 0;  // rows of positions below it
    uint32_t coded = 0;   // codes of positions below it; at most `tokens`
    std::vector<Span> spans;
    std::vector<Codebook> codebooks;
  };
  struct Seat {
    uint64_t sequence = 0;  // 0: the seat is free
    uint64_t last_step = 0;
  };
  struct Image {
    kernels::cuda::SeatItem* seats = nullptr;
    uint64_t* full_ranges = nullptr;
    kernels::cuda::OwnItem* own_items = nullptr;
    kernels::cuda::PageItem* page_items = nullptr;
    kernels::cuda::OwnRange* excluded = nullptr;
    kernels::cuda::ByteRange* code_ranges = nullptr;  // [non-resident code layers, lanes, planes]
    std::vector<Layer> layers;
  };
  // One layer of one item of the batch, at its seat.
  struct Place {
    const StepLayer& from;
    uint32_t row_end;
    uint32_t seat;
    uint32_t layer;
    uint32_t query_length;  // query tokens that share a selection
    bool selects;
    const Rows& rows;
    kernels::cuda::Stream stream;
  };

  static constexpr uint32_t kNoIndex = UINT32_MAX;

  size_t PlaceTables(void* base, Image& image) const;
  Status WriteExcluded(const StepBatch& batch);
  Status WriteOwn(const StepBatch& batch, uint32_t item);
  Status WritePageItem(const StepSequence& sequence, uint32_t item);
  Status DescribeItem(const StepBatch& batch, uint32_t item, bool is_new, const Rows& rows,
                      kernels::cuda::Stream stream);
  Status WriteFullRanges(const StepSequence& sequence, uint32_t item);
  Status FindSeats(const StepBatch& batch);
  void EmptySeats();
  Status Describe(const Place& place, uint32_t unchanged_tokens);
  Status CheckLayer(const Place& place) const;
  Status InvalidateRows(const Place& place, Described& described, uint32_t position);
  Status ExtendRows(const Place& place, Described& described);
  Status ExtendCodes(const Place& place, Described& described);
  Status CopyCodes(const Place& place, const StepSegment& segment, uint32_t begin, uint32_t end);
  Status CopyCentroids(const Place& place, const StepSegment& segment, size_t codebook);
  std::byte* HostCodes(uint32_t layer, size_t lane) const;
  void WriteCodeRanges(const Place& place);
  void WriteRowLanes(const Place& place, const Described& described);
  void WriteSpan(const Place& place, const StepSegment& segment, const Span& span, size_t index);
  Status WriteChunks(const Place& place, const Described& described);
  Described& described(uint32_t layer, uint32_t seat) {
    return described_[size_t{layer} * options_.sequence_capacity + seat];
  }

  StepsOptions options_;
  std::vector<uint32_t> code_layers_;  // [layers]: kNoIndex, or the number among those with codes
  uint32_t code_layer_count_ = 0;
  uint32_t lane_capacity_ = 0;
  uint32_t chunk_capacity_ = 0;
  uint32_t plane_count_ = 0;
  size_t plane_stride_ = 0;
  size_t codebook_floats_ = 0;
  const float* lane_queries_ = nullptr;
  const LayerCodes* codes_ = nullptr;
  size_t upload_bytes_ = 0;
  DeviceBuffer memory_;
  PinnedBuffer pinned_;
  PinnedBuffer host_codes_;  // [non-resident layers, lanes, planes, plane_stride_]
  Image device_;
  Image host_;
  OwnedEvent uploaded_;
  uint64_t step_ = 0;
  bool has_host_only_rows_ = false;
  std::vector<Seat> seats_;
  std::vector<Seat> previous_seats_;
  std::vector<uint32_t> item_seats_;  // [items of the batch]
  std::vector<Described> described_;  // [layer, seat]
};

}  // namespace pqcached::gpu

#endif  // PQCACHED_GPU_STEP_TABLES_H_

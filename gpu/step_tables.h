// StepTables: what the kernels of a step are told, in tables on the device; and who sits where.
//
// The host writes an image in page-locked memory, one copy brings it to the device between steps. Of each seat and
// layer it remembers what it has described: codes and centroids are copied once, when tokens first become candidates, in
// batches as large as the engine's window; spans of rows change as seldom. What was rolled back, or lies elsewhere by now,
// is forgotten there and in the block cache.
//
// Codes of resident layers (LayerCodes) are copied to the device. Those of the others are copied to page-locked memory of
// this class, laid out as on the device: one range of bytes for a plane, however many segments it comes from, and wherever the
// pool itself cannot be page-locked.
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
#include "kernels/cuda/pq_table.h"
#include "kernels/cuda/rows.h"
#include "kernels/cuda/seats.h"
#include "kernels/cuda/select.h"

namespace pqcached::gpu {

class StepTables {
 public:
  // On the device; the same from step to step.
  struct Layer {
    kernels::cuda::SelectLane* select_lanes = nullptr;  // [lanes]
    kernels::cuda::SelectChunk* chunks = nullptr;       // [lanes, chunk_capacity]
    kernels::cuda::TableTask* tasks = nullptr;          // [lanes, codebook_capacity]
    kernels::cuda::RowLane* row_lanes = nullptr;        // [lanes]
    kernels::cuda::DeviceRowSpan* spans = nullptr;      // [lanes, span_capacity]
    uint8_t* planes = nullptr;   // [lanes, planes, plane_stride]: slots are positions
    float* centroids = nullptr;  // [lanes, codebook_capacity, floats of a codebook]
  };

  // Where rows are read, and what else depends on them.
  struct Rows {
    PageLock* page_lock = nullptr;  // what it cannot lock, only the host reads
    const std::byte* pool = nullptr;
    BlockCache* caches = nullptr;  // [layers], or null
  };

  // Allocates for `options`, which are checked. `lane_queries` is where the queries of lanes will be on the device, `codes`
  // where codes are; both outlive it.
  // Errors: kOutOfMemory
  Status Create(const StepsOptions& options, const LayerCodes& codes, const float* lane_queries);
  // What LayerCodes is created with.
  static LayerCodes::Options CodesOptions(const StepsOptions& options);

  // Gives the sequences seats and writes the tables; `caches` are between BeginStep and EndStep. What it fails with
  // may have described some sequences; nothing has to be undone.
  //
  // REQUIRES: no codes of the step before are under way to the device, when some layers are not resident.
  // Errors: as Steps::Begin
  Status Update(const StepBatch& batch, const Rows& rows, kernels::cuda::Stream stream);
  // Whether the host has to bring rows of some span that was ever described.
  bool has_host_rows() const { return has_host_rows_; }
  // Forgets everything that was described. The block caches have to forget too.
  void Forget();

  const kernels::cuda::SeatItem* seats() const { return device_.seats; }
  // Codes of the layers that are not resident, for LayerCodes.
  const kernels::cuda::ByteRange* code_ranges() const { return device_.code_ranges; }
  const Layer& layer(uint32_t layer) const { return device_.layers[layer]; }
  uint32_t chunk_capacity() const { return chunk_capacity_; }
  size_t device_bytes() const { return memory_.size_bytes(); }

 private:
  // Where something lay when it was described.
  struct Codebook {
    const float* centroids = nullptr;
    uint32_t epoch = 0;
    uint32_t first_position = 0;
    friend bool operator==(const Codebook&, const Codebook&) = default;
  };
  struct Span {
    const std::byte* rows = nullptr;  // of the first head
    const uint8_t* planes = nullptr;
    uint32_t first_position = 0;
    uint32_t token_count = 0;
    uint32_t first_block = 0;
    Codebook codebook;
  };
  struct Described {
    uint32_t tokens = 0;
    std::vector<Span> spans;
    std::vector<Codebook> codebooks;
  };
  struct Seat {
    uint64_t sequence = 0;  // 0: nobody
    uint64_t last_step = 0;
  };
  struct Image {
    kernels::cuda::SeatItem* seats = nullptr;
    kernels::cuda::ByteRange* code_ranges = nullptr;  // [not resident layers, lanes, planes]
    std::vector<Layer> layers;
  };
  // One layer of one item, at its seat.
  struct Place {
    const StepLayer& from;
    uint32_t seat;
    uint32_t layer;
    uint32_t query_length;
    const Rows& rows;
    kernels::cuda::Stream stream;
  };

  size_t PlaceTables(void* base, Image& image) const;
  Status FindSeats(const StepBatch& batch);
  void EmptySeats();
  Status Describe(const Place& place, uint32_t unchanged_tokens);
  Status CheckLayer(const StepLayer& from) const;
  Status ForgetFrom(const Place& place, Described& described, uint32_t position);
  Status Extend(const Place& place, Described& described);
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
  PinnedBuffer host_codes_;  // [not resident layers, lanes, planes, plane_stride_]
  Image device_;
  Image host_;
  OwnedEvent uploaded_;
  uint64_t step_ = 0;
  bool has_host_rows_ = false;
  std::vector<Seat> seats_;
  std::vector<Seat> seats_before_;
  std::vector<uint32_t> item_seats_;  // of the batch
  std::vector<Described> described_;  // [layer, seat]
};

}  // namespace pqcached::gpu

#endif  // PQCACHED_GPU_STEP_TABLES_H_

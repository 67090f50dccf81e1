// State of one cache's GPU, to which pqc_gpu points, and the bridge from steps to libpqcached_gpu
// (gpu/steps.h).
#ifndef PQCACHED_CLIENT_GPU_GPU_H_
#define PQCACHED_CLIENT_GPU_GPU_H_

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "client/local/layer_source.h"
#include "client/step/device.h"
#include "client/step/handles.h"
#include "client/step/step.h"
#include "gpu/steps.h"
#include "kernels/base/mutex.h"
#include "pqcached/gpu.h"

namespace pqcached::client {

struct StepsCloser {
  void operator()(gpu::Steps* steps) const { steps->Close(); }
};

// State of a sequence at the last GPU step that used it.
struct GpuSequenceState {
  uint64_t lease_epoch = 0;  // LocalSequence::lease_epoch
  uint64_t lease_id = 0;     // a different lease may mean different rows
  uint64_t last_step = 0;    // GpuState::step_count
};

// State behind a pqc_gpu handle. It serves one step at a time; `busy` excludes other steps.
struct GpuState final : StepDevice {
  const CacheState& cache_state() const override { return *cache; }
  bool TryAcquire() override { return !busy.exchange(true); }
  pqc_status Begin(pqc_step& step, void* stream) override;
  pqc_status Attend(const LayerCall& call) override;
  pqc_status AttendPositions(const LayerCall& call, const pqc_position_lists& lists) override;
  pqc_status AttendRanges(const LayerCall& call, const pqc_token_range* of_items) override;
  pqc_status Decode(const LayerCall& call, const RowBlock& rows) override;
  const std::byte* DecodedRows(uint32_t layer, uint64_t* token_room) const override;
  pqc_status Select(const LayerCall& call, const pqc_gpu_positions& out) override;
  pqc_status SelectPages(const LayerCall& call) override;
  pqc_status Finish(pqc_step& step, std::vector<RowBlock>* blocks) override;
  void Release(pqc_step& step) override;

  std::shared_ptr<const CacheState> cache;  // shared with the cache's handle
  kvstore::IndexDescriptor index;
  uint32_t sequence_capacity = 0;
  uint32_t selected_capacity = 0;
  uint32_t query_length = 0;     // longest one
  LayerShape shape;              // the same for all layers, but for the kind
  std::vector<uint32_t> layers;  // ascending; a layer's index here is its ordinal on the GPU
  std::vector<gpu::StepLayerKind> kinds;  // of `layers`
  std::vector<uint32_t> windows;          // likewise: tokens of the window in layers of kind window
  std::atomic<bool> busy = false;
  uint64_t step_count = 0;
  // by sequence id; only sequences that may have a seat on the GPU
  std::map<uint64_t, GpuSequenceState> seen;

  // Memory that the GPU may still read: the pool until another pool replaces it, images until their
  // step's work is done.
  std::shared_ptr<Mapping> pool;  // shared, as all mappings are
  bool locks_pool = false;        // the sidecar keeps its pages in place
  std::vector<std::shared_ptr<Image>> held;

  // Prefill: one call at a time packs into the ring, which is page-locked.
  base::Mutex ingest_mutex;
  // Shared, as all mappings are.
  std::shared_ptr<Mapping> ring PQCACHED_GUARDED_BY(ingest_mutex);

  // Descriptions for the step that begins; their memory is reused from step to step.
  std::vector<OpenedLayer> opened;  // [items, layers]
  std::vector<std::vector<gpu::StepSegment>> segments;
  std::vector<std::vector<gpu::StepRange>> ranges;
  std::vector<gpu::StepLayer> step_layers;
  std::vector<gpu::StepSequence> sequences;
  // [items]: candidates in layers of kind full, and their number.
  std::vector<std::vector<gpu::StepRange>> full_ranges;
  std::vector<uint32_t> full_counts;
  std::vector<gpu::StepRange> excluded;  // of the step's selection

  // The last member, so that it is destroyed first: its destructor waits for the device.
  std::unique_ptr<gpu::Steps, StepsCloser> steps;
};

// Converts the outcome of a GPU call to a status, and sets the thread's last error.
pqc_status Report(const gpu::Outcome& outcome, const char* what);

// Loads libpqcached_gpu: from `path`, or where it is null from the folder of this library or the
// loader's search path.
pqc_status LoadGpuLibrary(const char* path, const gpu::GpuEntry** entry);

// Implements pqc_gpu_open. A null `entry` loads libpqcached_gpu and uses its entry.
pqc_status OpenGpu(pqc_cache* cache, const pqc_gpu_options* caller_options,
                   const gpu::GpuEntry* entry, pqc_gpu** gpu);

// Finds the ordinal of a stored layer.
pqc_status FindGpuLayer(const GpuState& gpu, uint32_t layer, uint32_t* ordinal);

// Returns the end of the rows that calls of the step may read of an item, but for decode calls.
uint32_t RowEnd(const pqc_step& step, const StepItem& item);

// Checks rows of a step's tokens on the device.
pqc_status CheckDeviceRows(const RowBlock& block);
// Returns the addresses and strides of such rows.
gpu::StepRows DeviceRowsOf(const RowBlock& block);
gpu::StepQueries DeviceQueriesOf(const TensorView& view);

// Decode calls. Checks that sinks and windows of the step fit.
pqc_status CheckDecodingStep(const GpuState& gpu, const pqc_step& step);
// Waits until items[number] has few rows that are not stored, and copies those of them that no
// other call of the step reads.
pqc_status TakeRecentRows(pqc_step& step, size_t number);
// Returns whether an item has tokens between sink and window.
bool HasCandidates(const pqc_step& step, const StepItem& item);
// Describes sinks and windows of all items, after TakeRecentRows of all of them.
void DescribeOwnRows(GpuState& gpu, const pqc_step& step);

// Describes the tokens that are no candidates of the step's selection, for all items.
void DescribeOthers(GpuState& gpu, const pqc_step& step);

// Implements pqc_gpu_ingest_with.
// Implements pqc_gpu_add_query_samples.
pqc_status AddSamplesOnGpu(pqc_gpu* handle, pqc_sequence* sequence,
                           const pqc_query_samples* samples, uint32_t sample_count, void* stream);
pqc_status IngestOnGpu(pqc_gpu* handle, pqc_sequence* sequence, uint32_t layer,
                       uint64_t first_position, const pqc_tensor* keys, const pqc_tensor* values,
                       const pqc_row_options* caller_options, void* stream);

// Implements pqc_gpu_merge_tensors.
pqc_status MergeOnGpu(pqc_gpu* gpu, const pqc_partial* caller_a, const pqc_partial* caller_b,
                      void* stream);

}  // namespace pqcached::client

struct pqc_gpu {
  std::shared_ptr<pqcached::client::GpuState> state;  // shared with the step in progress
};

#endif  // PQCACHED_CLIENT_GPU_GPU_H_

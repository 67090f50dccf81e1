// A GPU as one cache's steps use it: what pqc_gpu points at, and the bridge from steps to libpqcached_gpu (gpu/steps.h).
#ifndef PQCACHED_CLIENT_GPU_H_
#define PQCACHED_CLIENT_GPU_H_

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "client/handles.h"
#include "client/local/view.h"
#include "client/step.h"
#include "gpu/steps.h"
#include "pqcached/gpu.h"

namespace pqcached::client {

struct StepsCloser {
  void operator()(gpu::Steps* steps) const { steps->Close(); }
};

// How a sequence stood when a step on the GPU used it last.
struct GpuSeen {
  uint64_t epoch = 0;      // LocalSequence::epoch
  uint64_t lease_id = 0;   // another lease may mean other rows
  uint64_t last_step = 0;  // GpuState::step_count
};

// One step at a time; `busy` keeps the others out.
struct GpuState {
  std::shared_ptr<const CacheState> cache;  // shared with the handle's
  kvstore::IndexDescriptor index;
  uint32_t sequence_capacity = 0;
  uint32_t selected_capacity = 0;
  LayerShape shape;              // of all layers
  std::vector<uint32_t> layers;  // ascending; their ordinals are the GPU's
  std::atomic<bool> busy = false;
  uint64_t step_count = 0;
  std::map<uint64_t, GpuSeen> seen;  // by sequence, of those that may have a seat on the GPU

  // What the GPU may still read: the pool until another one is there, images until the work of their step is done.
  std::shared_ptr<Mapping> pool;  // shared as mappings are
  std::vector<std::shared_ptr<Image>> held;

  // Prefill: one call at a time packs, into a ring that is page-locked.
  std::mutex ingest_mutex;
  std::shared_ptr<Mapping> ring;  // shared as mappings are

  // Of the step that begins: memory that is used again.
  std::vector<OpenedLayer> opened;  // [items, layers]
  std::vector<std::vector<gpu::StepSegment>> segments;
  std::vector<std::vector<gpu::StepRange>> ranges;
  std::vector<gpu::StepLayer> step_layers;
  std::vector<gpu::StepSequence> sequences;

  // Last, so that it goes first: it waits for the device.
  std::unique_ptr<gpu::Steps, StepsCloser> steps;
};

// Passes on what the GPU's side returned.
pqc_status Report(const gpu::Outcome& outcome, const char* what);

// pqc_gpu_open. `entry`: null = that of libpqcached_gpu, which is loaded.
pqc_status OpenGpu(pqc_cache* cache, const pqc_gpu_options* caller_options,
                   const gpu::GpuEntry* entry, pqc_gpu** gpu);

// Ordinal of a stored layer.
pqc_status FindGpuLayer(const GpuState& gpu, uint32_t layer, uint32_t* ordinal);

// The rest of a step's begin: sequences are described to the GPU. The step holds gpu->busy.
pqc_status BeginOnGpu(pqc_step& step, void* stream);

// The step's attention of one layer, launched.
pqc_status AttendOnGpu(const LayerCall& call);

// Waits for the work of the step. `blocks`, when not null, are rows on the device: they are brought to the host, and name
// host memory afterwards.
pqc_status FinishOnGpu(pqc_step& step, std::vector<RowBlock>* blocks);

// Lets the GPU go, whatever was launched.
void LeaveGpu(pqc_step& step);

}  // namespace pqcached::client

struct pqc_gpu {
  std::shared_ptr<pqcached::client::GpuState> state;  // shared with the step under way
};

#endif  // PQCACHED_CLIENT_GPU_H_

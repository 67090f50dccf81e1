// StepDevice is a GPU as steps see it. Its implementation (gpu/gpu.h) includes steps, and steps
// include only this interface.
#ifndef PQCACHED_CLIENT_STEP_DEVICE_H_
#define PQCACHED_CLIENT_STEP_DEVICE_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "client/base/remote.h"
#include "pqcached/gpu.h"
#include "pqcached/positions.h"

namespace pqcached::client {

struct CacheState;
struct LayerCall;

// Serves one step at a time.
class StepDevice {
 public:
  virtual ~StepDevice() = default;

  // Returns the cache whose steps run here.
  virtual const CacheState& cache_state() const = 0;
  // Excludes other steps until Release. Returns false while another step is in progress.
  virtual bool TryAcquire() = 0;

  // Completes the beginning of a step: describes the sequences to the GPU.
  virtual pqc_status Begin(pqc_step& step, void* stream) = 0;
  // Launches the step's attention of one layer.
  virtual pqc_status Attend(const LayerCall& call) = 0;
  // Launches an attention of one layer to the rows at positions of the caller, which are on the
  // device.
  virtual pqc_status AttendPositions(const LayerCall& call, const pqc_position_lists& lists) = 0;
  // Launches an attention of one layer to the rows of a range of each item, [items], on the device.
  virtual pqc_status AttendRanges(const LayerCall& call, const pqc_token_range* ranges) = 0;
  // Launches the complete attention of one layer, and keeps the rows, which are on the device. The
  // step decodes.
  virtual pqc_status Decode(const LayerCall& call, const RowBlock& rows) = 0;
  // Finds the rows of a layer that the work of the step has decoded, [kv_heads, *token_room, row],
  // after Finish. Returns null where it has decoded none.
  virtual const std::byte* DecodedRows(uint32_t layer, uint64_t* token_room) const = 0;
  // Launches the step's selection of one layer.
  virtual pqc_status Select(const LayerCall& call, const pqc_gpu_positions& out) = 0;
  // Launches the step's selection of pages of one layer, call.pages.
  virtual pqc_status SelectPages(const LayerCall& call) = 0;
  // Waits for the work of the step. `blocks`, when not null, holds rows on the device: they are
  // copied to the host, and the blocks then refer to host memory.
  virtual pqc_status Finish(pqc_step& step, std::vector<RowBlock>* blocks) = 0;
  // Ends the step's use of the GPU, also after an abandoned step: waits first for the work that the
  // step launched.
  virtual void Release(pqc_step& step) = 0;
};

}  // namespace pqcached::client

#endif  // PQCACHED_CLIENT_STEP_DEVICE_H_

// BlockCache: rows of one layer that stay in device memory, per sequence and kv head, in blocks of 128.
//
// Owns the memory, and the order between a decode step and the update behind it: lookups and reads run on
// the caller's stream between BeginStep and EndStep; decisions and copies follow on a side stream, while the
// caller's stream goes on with other layers; the next BeginStep makes it wait, the host never does. So nothing that a
// step reads is written meanwhile.
//
// Thread-compatible, but for Read: one thread at a time, one stream at a time.
#ifndef PQCACHED_GPU_BLOCK_CACHE_H_
#define PQCACHED_GPU_BLOCK_CACHE_H_

#include <cstddef>
#include <cstdint>

#include "gpu/device.h"
#include "gpu/status.h"
#include "kernels/cuda/block_cache.h"
#include "kernels/cuda/rows.h"

namespace pqcached::gpu {

class BlockCache {
 public:
  struct Options {
    uint32_t lane_capacity = 0;    // sequences times kv heads, 1 to 65535
    uint32_t block_capacity = 0;   // blocks of the longest sequence, >= 1
    uint32_t cache_tokens = 4096;  // of a lane, a multiple of 128
    size_t row_stride_bytes = 0;   // a multiple of 16
    kernels::cuda::CachePolicy policy = kernels::cuda::CachePolicy::kFrequencyAdmission;
    float ageing = 0.9f;      // 0 to 1
    uint32_t max_loads = 32;  // blocks of a lane in one update, at most kMaxLoads
  };

  struct Counters {
    unsigned long long hits = 0;    // rows found in the cache
    unsigned long long misses = 0;  // rows read from the mapping
    unsigned long long loaded = 0;  // blocks copied into the cache
    unsigned long long evicted = 0;
  };

  BlockCache() = default;

  // Allocates, and empties all lanes on `stream`. Called once.
  //
  // Errors: kInvalid      an option is out of range (the message names it and the range)
  //         kOutOfMemory  of device memory
  Status Create(const Options& options, kernels::cuda::Stream stream);

  // `stream` goes on when the last update is done (FinishUpdate). Afterwards lookups may run on it, and the tables that EndStep
  // was given may be changed by it.
  Status BeginStep(kernels::cuda::Stream stream);

  // `stream` goes on when the last update is done, and the next BeginStep waits for nothing more. Needed around a step
  // that is captured in a graph: before the capture, and as the last of what is captured.
  Status FinishUpdate(kernels::cuda::Stream stream);

  // For LocateRows, between BeginStep and EndStep.
  kernels::cuda::BlockResidency residency() const;

  // Starts the update from what was looked up, once all that `stream` has been given is done. `lanes` and `spans`
  // are the device tables that LocateRows had.
  Status EndStep(kernels::cuda::Stream stream, const kernels::cuda::RowLane* lanes,
                 const kernels::cuda::DeviceRowSpan* spans);

  // Between BeginStep and EndStep: forgets blocks [first_block, ...) of lanes [lane_begin, lane_end). Before a lane
  // gets another sequence, and before rows behind first_block are written again (roll-back).
  Status Forget(kernels::cuda::Stream stream, uint32_t lane_begin, uint32_t lane_end,
                uint32_t first_block);

  // As of the last EndStep, whose update it waits for. From any thread, beside steps and captures; for status pages and
  // benches.
  Status Read(Counters& counters) const;

  size_t device_bytes() const { return memory_.size_bytes(); }

 private:
  Options options_;
  DeviceBuffer memory_;
  kernels::cuda::BlockCacheState state_;
  unsigned long long* counters_ = nullptr;  // [4], as in Counters
  OwnedStream side_stream_;
  OwnedEvent step_done_;
  OwnedEvent update_done_;
  bool update_pending_ = false;  // no stream waits for update_done_ yet
};

}  // namespace pqcached::gpu

#endif  // PQCACHED_GPU_BLOCK_CACHE_H_

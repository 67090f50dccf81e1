// BlockCache keeps rows (KV entries) of one layer in device memory, per sequence and kv head, in
// blocks of 128 rows.
//
// The cache owns its device memory and orders each decode step against the cache update that
// follows it. Lookups and reads run on the caller's stream between BeginStep and EndStep. The
// admission decisions and the copies run afterwards on a side stream, while the caller's stream
// continues with other layers. The next BeginStep makes the caller's stream wait for the update;
// the host never waits. The update therefore never writes anything that a running step reads.
//
// Thread-compatible, except Read (any thread): one thread at a time, one stream at a time.
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
    uint32_t cache_tokens = 4096;  // per lane, a multiple of 128
    size_t row_stride_bytes = 0;   // a multiple of 16
    kernels::cuda::CachePolicy policy = kernels::cuda::CachePolicy::kFrequencyAdmission;
    float ageing = 0.9f;      // 0 to 1
    uint32_t max_loads = 32;  // blocks per lane in one update, at most kMaxLoads
  };

  struct Counters {
    unsigned long long hits = 0;    // rows found in the cache
    unsigned long long misses = 0;  // rows read from the mapping
    unsigned long long loaded = 0;  // blocks copied into the cache
    unsigned long long evicted = 0;
  };

  BlockCache() = default;

  // Allocates the memory and empties all lanes on `stream`. Called once.
  //
  // Errors: kInvalid      an option is out of range (the message names it and the range)
  //         kOutOfMemory  the device has too little free memory
  Status Create(const Options& options, kernels::cuda::Stream stream);

  // Makes `stream` wait for the last update (as FinishUpdate does). Work enqueued on `stream`
  // afterwards may look rows up and may change the tables that EndStep received.
  Status BeginStep(kernels::cuda::Stream stream);

  // Makes `stream` wait for the last update, so that the next BeginStep has nothing left to wait
  // for. Required around a step that is captured in a graph: before the capture, and as the last
  // captured operation.
  Status FinishUpdate(kernels::cuda::Stream stream);

  // Returns the argument for LocateRows. Valid between BeginStep and EndStep.
  kernels::cuda::BlockResidency residency() const;

  // Starts the update from the recorded lookups, once all work enqueued on `stream` so far is done.
  // `lanes` and `spans` are the device tables that LocateRows received.
  Status EndStep(kernels::cuda::Stream stream, const kernels::cuda::RowLane* lanes,
                 const kernels::cuda::DeviceRowSpan* spans);

  // Invalidates blocks [first_block, ...) of lanes [lane_begin, lane_end). Called between BeginStep
  // and EndStep, before a lane is given to another sequence and before rows from first_block on are
  // rewritten after a roll-back.
  Status InvalidateRange(kernels::cuda::Stream stream, uint32_t lane_begin, uint32_t lane_end,
                         uint32_t first_block);

  // Waits for the update of the last EndStep and copies its counters. May be called from any
  // thread, concurrently with steps and captures; meant for status pages and benchmarks.
  Status Read(Counters& counters) const;

  size_t device_bytes() const { return memory_.size_bytes(); }

 private:
  Options options_;
  DeviceBuffer memory_;
  kernels::cuda::BlockCacheState state_;
  unsigned long long* counters_ = nullptr;  // [4], in the order of Counters
  OwnedStream side_stream_;
  OwnedEvent step_done_;
  OwnedEvent update_done_;
  bool update_pending_ = false;  // no stream waits for update_done_ yet
};

}  // namespace pqcached::gpu

#endif  // PQCACHED_GPU_BLOCK_CACHE_H_

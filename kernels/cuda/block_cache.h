// Block cache kernels: the device decides which blocks of rows a cache in device memory contains
// (residency, policies, loads).
//
// A lane is one sequence under one kv head; each lane has `slot_capacity` cache slots of
// kBlockSlots rows. LocateRows (kernels/cuda/rows.h) looks blocks up and counts touches.
// UpdateBlocks ages and compares the counts, chooses the blocks to load and to evict, and copies
// rows from the mapping. Only *complete* blocks, whose last row has been written, are admitted, so
// resident rows never change. The host takes no part; the caller orders updates against lookups
// with streams (gpu/block_cache.h).
#ifndef PQCACHED_KERNELS_CUDA_BLOCK_CACHE_H_
#define PQCACHED_KERNELS_CUDA_BLOCK_CACHE_H_

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/rows.h"
#include "kernels/cuda/status.h"

namespace pqcached::kernels::cuda {

enum class CachePolicy : uint8_t {
  // Like kLfu, but frequencies of all blocks are kept, resident or not, and that of the new block
  // must be larger by the factor kAdmissionMargin: a block requested once does not evict one that
  // is requested occasionally.
  kFrequencyAdmission = 1,
  // Evicts the block that was requested longest ago, but never one that this step requested.
  kLru = 2,
  // Evicts the block with the smallest frequency since its admission, if the frequency of the new
  // block (its rows requested in this step) is larger. Frequencies age.
  kLfu = 3,
};

inline constexpr float kAdmissionMargin = 1.25f;
inline constexpr uint32_t kMaxLoads = 128;

struct BlockLoad {
  uint32_t block = 0;
  uint32_t slot = 0;
};

// State of a cache. All arrays are in device memory. A cache is initialised by InvalidateBlocks of
// all its lanes.
struct BlockCacheState {
  uint32_t lane_capacity = 0;             // at most 65535
  uint32_t block_capacity = 0;            // largest number of blocks of one lane
  uint32_t slot_capacity = 0;             // cache slots per lane
  size_t row_stride_bytes = 0;            // a multiple of 16
  uint32_t* cache_slots = nullptr;        // [lane, block_capacity]
  uint32_t* touches = nullptr;            // [lane, block_capacity]
  float* frequencies = nullptr;           // [lane, block_capacity]
  uint32_t* slot_blocks = nullptr;        // [lane, slot_capacity]
  uint32_t* last_uses = nullptr;          // [lane, slot_capacity], update count at the last use
  uint32_t* update_counts = nullptr;      // [lane]
  std::byte* rows = nullptr;              // [lane, slot_capacity, kBlockSlots, row_stride_bytes]
  BlockLoad* loads = nullptr;             // [lane, kMaxLoads]: loads of the last update
  uint32_t* load_counts = nullptr;        // [lane]
  unsigned long long* loaded = nullptr;   // one counter, incremented: blocks loaded
  unsigned long long* evicted = nullptr;  // one counter, incremented: blocks evicted
};

struct UpdateBlocksArgs {
  BlockCacheState state;
  CachePolicy policy = CachePolicy::kFrequencyAdmission;
  float ageing = 0.9f;             // factor of a frequency in each update
  uint32_t max_loads = 32;         // per lane and update, at most kMaxLoads
  const RowLane* lanes = nullptr;  // the arguments of LocateRows
  const DeviceRowSpan* spans = nullptr;
};

// Chooses the loads from the touches since the last update, clears the touches, and copies the rows
// of the chosen blocks; 2 launches. Among equal blocks the lowest index is taken first.
//
// Errors: those of the launches; cudaErrorInvalidValue when a number is out of range.
KernelStatus UpdateBlocks(const UpdateBlocksArgs& args, Stream stream);

struct InvalidateBlocksArgs {
  BlockCacheState state;
  uint32_t lane_begin = 0;
  uint32_t lane_end = 0;
  uint32_t first_block = 0;  // the first block to forget; 0: the whole lane, for another sequence
};

// Removes these blocks from the cache and clears their touches and frequencies. Called for lanes
// that are given to another sequence, and after a roll-back of a sequence. Errors: as above.
KernelStatus InvalidateBlocks(const InvalidateBlocksArgs& args, Stream stream);

}  // namespace pqcached::kernels::cuda

#endif  // PQCACHED_KERNELS_CUDA_BLOCK_CACHE_H_

// Which blocks of rows a cache in device memory holds, decided on the device: residency, policies, loads.
//
// A lane is one sequence under one kv head; each has `slot_capacity` cache slots of kBlockSlots rows. LocateRows
// (kernels/cuda/rows.h) looks blocks up and counts touches; UpdateBlocks ages and compares, chooses what to load and
// what to give up, and copies the rows from the mapping. Only *complete* blocks are admitted, whose last row is
// there: what is resident never changes. The host takes no part; ordering against lookups is the caller's, by
// streams (gpu/block_cache.h).
#ifndef PQCACHED_KERNELS_CUDA_BLOCK_CACHE_H_
#define PQCACHED_KERNELS_CUDA_BLOCK_CACHE_H_

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/rows.h"
#include "kernels/cuda/status.h"

namespace pqcached::kernels::cuda {

enum class CachePolicy : uint8_t {
  // As kLfu, but frequencies of all blocks are kept, resident or not, and the new one must be larger by
  // kAdmissionMargin: a block asked for once does not push out one that is asked for now and then.
  kFrequencyAdmission = 1,
  // The block asked for longest ago gives way; blocks of this step never do.
  kLru = 2,
  // The block with the smallest frequency since it was admitted gives way, if that of the new one, the rows asked for
  // in this step, is larger. Frequencies age.
  kLfu = 3,
};

inline constexpr float kAdmissionMargin = 1.25f;
inline constexpr uint32_t kMaxLoads = 128;

struct BlockLoad {
  uint32_t block = 0;
  uint32_t slot = 0;
};

// All arrays in device memory. A cache begins with ForgetBlocks of all its lanes.
struct BlockCacheState {
  uint32_t lane_capacity = 0;             // at most 65535
  uint32_t block_capacity = 0;            // blocks of one lane that can be told apart
  uint32_t slot_capacity = 0;             // cache slots of one lane
  size_t row_stride_bytes = 0;            // a multiple of 16
  uint32_t* cache_slots = nullptr;        // [lane, block_capacity]
  uint32_t* touches = nullptr;            // [lane, block_capacity]
  float* frequencies = nullptr;           // [lane, block_capacity]
  uint32_t* slot_blocks = nullptr;        // [lane, slot_capacity]
  uint32_t* last_uses = nullptr;          // [lane, slot_capacity], in updates
  uint32_t* update_counts = nullptr;      // [lane]
  std::byte* rows = nullptr;              // [lane, slot_capacity, kBlockSlots, row_stride_bytes]
  BlockLoad* loads = nullptr;             // [lane, kMaxLoads]: of the last update
  uint32_t* load_counts = nullptr;        // [lane]
  unsigned long long* loaded = nullptr;   // one number, added to: blocks loaded
  unsigned long long* evicted = nullptr;  // likewise: blocks given up for others
};

struct UpdateBlocksArgs {
  BlockCacheState state;
  CachePolicy policy = CachePolicy::kFrequencyAdmission;
  float ageing = 0.9f;             // what is left of a frequency after an update
  uint32_t max_loads = 32;         // of a lane in one update, at most kMaxLoads
  const RowLane* lanes = nullptr;  // as LocateRows had them
  const DeviceRowSpan* spans = nullptr;
};

// Decides on loads from the touches since the last update, clears them, and copies the rows of blocks to load; 2
// launches. Of equal blocks the lowest index goes first.
//
// Errors: those of the launches; cudaErrorInvalidValue when a number is out of range.
KernelStatus UpdateBlocks(const UpdateBlocksArgs& args, Stream stream);

struct ForgetBlocksArgs {
  BlockCacheState state;
  uint32_t lane_begin = 0;
  uint32_t lane_end = 0;
  uint32_t first_block =
      0;  // this block and all behind it; 0: the whole lane, for another sequence
};

// Nothing of these blocks is resident, touched or remembered afterwards. For lanes that get another sequence, and after
// a sequence was rolled back. Errors: as above.
KernelStatus ForgetBlocks(const ForgetBlocksArgs& args, Stream stream);

}  // namespace pqcached::kernels::cuda

#endif  // PQCACHED_KERNELS_CUDA_BLOCK_CACHE_H_

#include "gpu/block_cache.h"

#include <cuda_runtime.h>

#include <string>

#include "gpu/arena.h"
#include "gpu/limits.h"
#include "kernels/base/status_macros.h"

namespace pqcached::gpu {
namespace {

using kernels::cuda::kBlockSlots;
using kernels::cuda::kMaxLoads;

constexpr uint32_t kMaxBlocks = 1u << 24;  // 2^30 tokens; segments may end in partial blocks
constexpr uint32_t kMaxCacheTokens = 1u << 24;

Status Invalid(const char* field, const char* range) {
  return {Code::kInvalid, std::string(field) + " must be " + range};
}

Status Check(const BlockCache::Options& options) {
  if (options.lane_capacity < 1 || options.lane_capacity > kMaxLanes) {
    return Invalid("lane_capacity", "1 to 65535");
  }
  if (options.block_capacity < 1 || options.block_capacity > kMaxBlocks) {
    return Invalid("block_capacity", "1 to 2^24");
  }
  if (options.cache_tokens < kBlockSlots || options.cache_tokens > kMaxCacheTokens ||
      options.cache_tokens % kBlockSlots != 0) {
    return Invalid("cache_tokens", "a multiple of 128, at most 2^24");
  }
  if (options.row_stride_bytes == 0 || options.row_stride_bytes % 16 != 0 ||
      options.row_stride_bytes > kMaxRowBytes) {
    return Invalid("row_stride_bytes", "a multiple of 16, at most 4096");
  }
  if (!(options.ageing >= 0.0f && options.ageing <= 1.0f)) return Invalid("ageing", "0 to 1");
  if (options.max_loads > kMaxLoads) return Invalid("max_loads", "at most 128");
  return {};
}

}  // namespace

Status BlockCache::Create(const Options& options, kernels::cuda::Stream stream) {
  RETURN_IF_ERROR(Check(options));
  options_ = options;
  const size_t lanes = options.lane_capacity;
  const size_t blocks = lanes * options.block_capacity;
  const size_t slots = lanes * (options.cache_tokens / kBlockSlots);
  state_.lane_capacity = options.lane_capacity;
  state_.block_capacity = options.block_capacity;
  state_.slot_capacity = options.cache_tokens / kBlockSlots;
  state_.row_stride_bytes = options.row_stride_bytes;
  const auto place = [&](Arena& arena) {
    arena.Place(counters_, 4);
    arena.Place(state_.cache_slots, blocks);
    arena.Place(state_.touches, blocks);
    arena.Place(state_.frequencies, blocks);
    arena.Place(state_.slot_blocks, slots);
    arena.Place(state_.last_uses, slots);
    arena.Place(state_.update_counts, lanes);
    arena.Place(state_.loads, lanes * kMaxLoads);
    arena.Place(state_.load_counts, lanes);
    arena.Place(state_.rows, slots * kBlockSlots * options.row_stride_bytes);
  };
  Arena sizes;
  place(sizes);
  RETURN_IF_ERROR(memory_.Allocate(sizes.size_bytes()));
  Arena arena(memory_.data());
  place(arena);
  state_.loaded = counters_ + 2;
  state_.evicted = counters_ + 3;
  RETURN_IF_ERROR(side_stream_.Create());
  RETURN_IF_ERROR(step_done_.Create());
  RETURN_IF_ERROR(update_done_.Create());
  const cudaError_t error = cudaMemsetAsync(counters_, 0, 4 * sizeof(unsigned long long), stream);
  if (error != cudaSuccess) return FromCuda(error, "clearing the counters");
  return InvalidateRange(stream, 0, options.lane_capacity, 0);
}

Status BlockCache::BeginStep(kernels::cuda::Stream stream) { return FinishUpdate(stream); }

Status BlockCache::FinishUpdate(kernels::cuda::Stream stream) {
  if (!update_pending_) return {};
  RETURN_IF_ERROR(update_done_.MakeWait(stream));
  update_pending_ = false;
  return {};
}

kernels::cuda::BlockResidency BlockCache::residency() const {
  return {.block_capacity = state_.block_capacity,
          .cache_slots = state_.cache_slots,
          .slot_capacity = state_.slot_capacity,
          .cached_rows = state_.rows,
          .touches = state_.touches,
          .hits = counters_,
          .misses = counters_ + 1};
}

Status BlockCache::EndStep(kernels::cuda::Stream stream, const kernels::cuda::RowLane* lanes,
                           const kernels::cuda::DeviceRowSpan* spans) {
  RETURN_IF_ERROR(step_done_.Record(stream));
  RETURN_IF_ERROR(step_done_.MakeWait(side_stream_.get()));
  const kernels::cuda::KernelStatus updated =
      kernels::cuda::UpdateBlocks({.state = state_,
                                   .policy = options_.policy,
                                   .ageing = options_.ageing,
                                   .max_loads = options_.max_loads,
                                   .lanes = lanes,
                                   .spans = spans},
                                  side_stream_.get());
  if (!updated.ok()) return FromKernel(updated, "updating the block cache");
  update_pending_ = true;
  return update_done_.Record(side_stream_.get());
}

Status BlockCache::InvalidateRange(kernels::cuda::Stream stream, uint32_t lane_begin,
                                   uint32_t lane_end, uint32_t first_block) {
  return FromKernel(kernels::cuda::InvalidateBlocks({.state = state_,
                                                     .lane_begin = lane_begin,
                                                     .lane_end = lane_end,
                                                     .first_block = first_block},
                                                    stream),
                    "forgetting blocks");
}

Status BlockCache::Read(Counters& counters) const {
  const RelaxedCaptureMode beside;
  unsigned long long values[4] = {};
  cudaError_t error = cudaMemcpyAsync(values, counters_, sizeof(values), cudaMemcpyDeviceToHost,
                                      side_stream_.get());
  if (error == cudaSuccess) error = cudaStreamSynchronize(side_stream_.get());
  counters = {values[0], values[1], values[2], values[3]};
  return FromCuda(error, "reading the counters of the block cache");
}

}  // namespace pqcached::gpu

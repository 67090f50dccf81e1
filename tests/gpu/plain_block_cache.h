// PlainBlockCache: what kernels/cuda/block_cache.h decides for one lane, written plainly: the reference of its test, and what
// gpu_cache_study counts hits with.
#ifndef PQCACHED_TESTS_GPU_PLAIN_BLOCK_CACHE_H_
#define PQCACHED_TESTS_GPU_PLAIN_BLOCK_CACHE_H_

#include <cstdint>
#include <functional>
#include <vector>

#include "kernels/cuda/block_cache.h"

namespace pqcached {

class PlainBlockCache {
 public:
  struct Options {
    kernels::cuda::CachePolicy policy = kernels::cuda::CachePolicy::kLru;
    uint32_t block_capacity = 0;
    uint32_t slot_capacity = 0;
    float ageing = 0.9f;
    uint32_t max_loads = 32;
  };

  explicit PlainBlockCache(const Options& options)
      : options_(options),
        slots_of_blocks_(options.block_capacity, kernels::cuda::kNotResident),
        frequencies_(options.block_capacity, 0.0f),
        blocks_of_slots_(options.slot_capacity, kernels::cuda::kNotResident),
        last_uses_(options.slot_capacity, 0) {}

  bool IsResident(uint32_t block) const {
    return slots_of_blocks_[block] != kernels::cuda::kNotResident;
  }
  uint64_t load_count() const { return load_count_; }

  // `touches`: rows of each block that the step asked for.
  void Update(const std::vector<uint32_t>& touches,
              const std::function<bool(uint32_t)>& is_complete) {
    ++update_;
    Age(touches);
    for (uint32_t load = 0; load < options_.max_loads; ++load) {
      uint32_t candidate = kernels::cuda::kNotResident;
      for (uint32_t block = 0; block < options_.block_capacity; ++block) {
        if (touches[block] == 0 || IsResident(block) || !is_complete(block)) continue;
        if (candidate == kernels::cuda::kNotResident ||
            frequencies_[block] > frequencies_[candidate]) {
          candidate = block;
        }
      }
      if (candidate == kernels::cuda::kNotResident) return;
      uint32_t victim = 0;
      for (uint32_t slot = 1; slot < options_.slot_capacity; ++slot) {
        if (EvictionScore(slot) > EvictionScore(victim)) victim = slot;
      }
      if (!MustEvict(candidate, victim)) return;
      if (blocks_of_slots_[victim] != kernels::cuda::kNotResident) {
        slots_of_blocks_[blocks_of_slots_[victim]] = kernels::cuda::kNotResident;
      }
      blocks_of_slots_[victim] = candidate;
      slots_of_blocks_[candidate] = victim;
      last_uses_[victim] = update_;
      ++load_count_;
    }
  }

 private:
  void Age(const std::vector<uint32_t>& touches) {
    for (uint32_t block = 0; block < options_.block_capacity; ++block) {
      const bool kept =
          options_.policy == kernels::cuda::CachePolicy::kFrequencyAdmission || IsResident(block);
      const float before = kept ? options_.ageing * frequencies_[block] : 0.0f;
      frequencies_[block] = before + static_cast<float>(touches[block]);
      if (IsResident(block) && touches[block] > 0) last_uses_[slots_of_blocks_[block]] = update_;
    }
  }

  float EvictionScore(uint32_t slot) const {
    const uint32_t block = blocks_of_slots_[slot];
    if (block == kernels::cuda::kNotResident) return 3e38f;
    if (options_.policy == kernels::cuda::CachePolicy::kLru) {
      return static_cast<float>(update_ - last_uses_[slot]);
    }
    return 1.0f / (1.0f + frequencies_[block]);
  }

  bool MustEvict(uint32_t candidate, uint32_t victim) const {
    const uint32_t block = blocks_of_slots_[victim];
    if (block == kernels::cuda::kNotResident) return true;
    if (options_.policy == kernels::cuda::CachePolicy::kLru) return last_uses_[victim] < update_;
    const bool has_margin = options_.policy == kernels::cuda::CachePolicy::kFrequencyAdmission;
    const float margin = has_margin ? kernels::cuda::kAdmissionMargin : 1.0f;
    return frequencies_[candidate] > margin * frequencies_[block];
  }

  Options options_;
  uint32_t update_ = 0;
  uint64_t load_count_ = 0;
  std::vector<uint32_t> slots_of_blocks_;
  std::vector<float> frequencies_;
  std::vector<uint32_t> blocks_of_slots_;
  std::vector<uint32_t> last_uses_;
};

}  // namespace pqcached

#endif  // PQCACHED_TESTS_GPU_PLAIN_BLOCK_CACHE_H_

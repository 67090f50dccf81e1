#include "kvstore/evict/memory_pressure.h"

#include <malloc.h>

#include <algorithm>
#include <limits>

#include "absl/strings/str_cat.h"

namespace pqcached::kvstore {
namespace {

// Memory is short when less than this is left in the machine or in a control group.
constexpr size_t kShortBytes = size_t{64} << 20;

}  // namespace

void ApplyMemoryLimits(const MemoryLimits& limits,
                       std::span<const std::shared_ptr<const Cache>> caches, Evictor& evictor) {
  const bool is_short = limits.excess_bytes > 0 || limits.available_bytes < kShortBytes;
  if (is_short) malloc_trim(0);
  size_t left_bytes = limits.excess_bytes;
  const auto give_back = [&](Pool& pool) {
    if (left_bytes > 0) left_bytes -= std::min(left_bytes, pool.ReturnFreePages(left_bytes));
  };
  for (const auto& cache : caches) {
    cache->pool->PauseTouching(is_short);
    cache->pool->ReturnGrant();
    left_bytes -= std::min(left_bytes, cache->pool->ReturnUnusedPages());
    give_back(*cache->pool);  // free pages first
  }
  for (const auto& cache : caches) {
    if (left_bytes == 0) break;
    if (cache->pool->KeepsPages()) continue;  // nothing would return
    cache->pages != nullptr ? cache->pages->Evict(left_bytes)
                            : evictor.FreeRetained(*cache, left_bytes);
    give_back(*cache->pool);
  }
  for (const auto& cache : caches) {
    Pool& pool = *cache->pool;
    if (!is_short) {
      pool.SetUseLimit(std::numeric_limits<size_t>::max(), {});
    } else if (const size_t absent_bytes = pool.absent_bytes(); absent_bytes > 0) {
      pool.SetUseLimit(pool.usage().capacity_bytes - absent_bytes,
                       absl::StrCat("; memory is short: ", limits.source));
    }
  }
}

}  // namespace pqcached::kvstore

#include "kvstore/memory/buddy.h"

#include <bit>

#include "kernels/base/check.h"

namespace pqcached::kvstore {

BuddyAllocator::BuddyAllocator(uint32_t unit_count) : unit_count_(unit_count), free_(kOrderCount) {
  // The largest aligned extents that tile [0, unit_count) are the binary digits of unit_count, from
  // the highest.
  uint32_t unit = 0;
  while (unit < unit_count) {
    const uint32_t length = std::bit_floor(unit_count - unit);
    free_[static_cast<size_t>(std::countr_zero(length))].insert(unit);
    unit += length;
  }
}

std::optional<uint32_t> BuddyAllocator::Allocate(uint32_t order) {
  if (order >= kOrderCount) return std::nullopt;
  uint32_t found = order;
  while (found < kOrderCount && free_[found].empty()) ++found;
  if (found == kOrderCount) return std::nullopt;
  const uint32_t unit = *free_[found].begin();
  free_[found].erase(free_[found].begin());
  while (found > order) {
    --found;
    free_[found].insert(unit + (uint32_t{1} << found));
  }
  order_of_.emplace(unit, order);
  used_units_ += uint64_t{1} << order;
  return unit;
}

bool BuddyAllocator::Claim(uint32_t unit, uint32_t order) {
  if (order >= kOrderCount || unit % (uint64_t{1} << order) != 0) return false;
  for (uint32_t found = order; found < kOrderCount; ++found) {
    uint32_t begin = static_cast<uint32_t>(unit & ~((uint64_t{1} << found) - 1));
    if (free_[found].erase(begin) == 0) continue;
    while (found > order) {  // keeps the halves that do not contain the extent free
      --found;
      const uint32_t upper = begin + (uint32_t{1} << found);
      free_[found].insert(unit < upper ? upper : begin);
      if (unit >= upper) begin = upper;
    }
    order_of_.emplace(unit, order);
    used_units_ += uint64_t{1} << order;
    return true;
  }
  return false;
}

bool BuddyAllocator::IsFree(uint32_t unit, uint32_t order) const {
  for (uint32_t found = order; found < kOrderCount; ++found) {
    if (free_[found].contains(static_cast<uint32_t>(unit & ~((uint64_t{1} << found) - 1)))) {
      return true;
    }
  }
  return false;
}

void BuddyAllocator::Free(uint32_t unit, uint32_t order) {
  const auto it = order_of_.find(unit);
  PQC_CHECK(it != order_of_.end() && it->second == order);
  order_of_.erase(it);
  used_units_ -= uint64_t{1} << order;
  while (order + 1 < kOrderCount) {
    const uint32_t buddy = unit ^ (uint32_t{1} << order);
    if (free_[order].erase(buddy) == 0) break;
    unit &= ~(uint32_t{1} << order);
    ++order;
  }
  free_[order].insert(unit);
}

uint64_t BuddyAllocator::largest_free_units() const {
  for (uint32_t order = kOrderCount; order-- > 0;) {
    if (!free_[order].empty()) return uint64_t{1} << order;
  }
  return 0;
}

}  // namespace pqcached::kvstore

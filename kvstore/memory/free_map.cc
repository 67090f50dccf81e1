#include "kvstore/memory/free_map.h"

#include <algorithm>
#include <bit>
#include <limits>

namespace pqcached::kvstore {

uint32_t OrderFor(size_t size_bytes) {
  const size_t units = std::max<size_t>(1, (size_bytes + kMinExtentBytes - 1) >> kExtentUnitShift);
  return static_cast<uint32_t>(std::bit_width(units - 1));
}

ExtentDemand::ExtentDemand(std::span<const size_t> sizes_bytes) {
  for (const size_t size_bytes : sizes_bytes) Add(size_bytes);
}

void ExtentDemand::Add(size_t size_bytes, uint64_t extent_count) {
  const uint32_t order = std::min(OrderFor(size_bytes), kOrderCount - 1);
  counts_[order] += extent_count;
  size_t bytes = 0;
  if (__builtin_mul_overflow(kMinExtentBytes << order, extent_count, &bytes) ||
      __builtin_add_overflow(bytes_, bytes, &bytes_)) {
    bytes_ = std::numeric_limits<size_t>::max();
  }
}

void FreeMap::Free(ExtentRef extent) {
  if (pinned_units_.contains(extent.unit)) return;
  used_bytes_ -= extent.size_bytes();
  uint32_t unit = extent.unit;
  uint32_t order = extent.order;
  while (order + 1 < free_.size()) {
    const uint32_t buddy = unit ^ (uint32_t{1} << order);
    if (free_[order].erase(buddy) == 0) break;
    unit &= ~(uint32_t{1} << order);
    ++order;
  }
  free_[order].insert(unit);
}

// ShortfallBytes goes from the largest order down: each extent that is left at one order provides
// two at the next. Extents are aligned to their size, so alignment never prevents a fit.
bool FreeMap::Fits(const ExtentDemand& demand) const { return ShortfallBytes(demand) == 0; }

size_t FreeMap::ShortfallBytes(const ExtentDemand& demand) const {
  const size_t allowed_bytes = limit_bytes_ - std::min(limit_bytes_, used_bytes_);
  if (demand.bytes() > allowed_bytes) return demand.bytes() - allowed_bytes;
  uint64_t left = 0;
  size_t missing_bytes = 0;
  size_t free_bytes = 0;
  for (uint32_t order = ExtentDemand::kOrderCount; order-- > 0;) {
    const uint64_t here = order < free_.size() ? free_[order].size() : 0;
    free_bytes += here * (kMinExtentBytes << order);
    left = 2 * left + here;
    const uint64_t wanted = demand.count(order);
    if (wanted > left) missing_bytes += (wanted - left) * (kMinExtentBytes << order);
    left -= std::min(left, wanted);
  }
  if (demand.bytes() > free_bytes) return demand.bytes() - free_bytes;
  return missing_bytes;
}

size_t FreeMap::largest_free_bytes() const {
  for (size_t order = free_.size(); order-- > 0;) {
    if (!free_[order].empty()) return kMinExtentBytes << order;
  }
  return 0;
}

}  // namespace pqcached::kvstore

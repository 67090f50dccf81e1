#include "kvstore/memory/free_map.h"

#include <algorithm>
#include <limits>

namespace pqcached::kvstore {

ExtentDemand::ExtentDemand(std::span<const size_t> sizes_bytes) {
  for (const size_t size_bytes : sizes_bytes) Add(size_bytes);
}

void ExtentDemand::Add(size_t size_bytes, uint64_t extent_count) {
  const size_t units = std::min<size_t>(UnitsFor(size_bytes), std::numeric_limits<uint32_t>::max());
  counts_[static_cast<uint32_t>(units)] += extent_count;
  size_t bytes = 0;
  if (__builtin_mul_overflow(units << kExtentUnitShift, extent_count, &bytes) ||
      __builtin_add_overflow(bytes_, bytes, &bytes_)) {
    bytes_ = std::numeric_limits<size_t>::max();
  }
}

bool FreeMap::Free(UnitRange units) {
  if (pinned_units_.contains(units.begin) || !units_.IsUsed(units)) return false;
  units_.Free(units);
  return true;
}

bool FreeMap::Fits(const ExtentDemand& demand) const { return ShortfallBytes(demand) == 0; }

// Allocates the longest extents first, as Pool::Allocate does.
size_t FreeMap::ShortfallBytes(const ExtentDemand& demand) const {
  const size_t allowed_bytes = limit_bytes_ - std::min(limit_bytes_, used_bytes());
  if (demand.bytes() > allowed_bytes) return demand.bytes() - allowed_bytes;
  const size_t free_bytes = size_t{units_.free_units()} << kExtentUnitShift;
  if (demand.bytes() > free_bytes) return demand.bytes() - free_bytes;
  RunAllocator left = units_;
  size_t missing_bytes = 0;
  for (const auto& [units, count] : demand.counts()) {
    const uint64_t missing = count - left.AllocateMany(units, count);
    missing_bytes += missing * (size_t{units} << kExtentUnitShift);
  }
  return missing_bytes;
}

}  // namespace pqcached::kvstore

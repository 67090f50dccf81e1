// FreeMap: a copy of the free units of a pool, to compute which allocations would succeed after
// more extents are freed.
//
// Changes to the copy do not affect the pool. Thread-compatible.
#ifndef PQCACHED_KVSTORE_MEMORY_FREE_MAP_H_
#define PQCACHED_KVSTORE_MEMORY_FREE_MAP_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <span>
#include <unordered_set>
#include <utility>
#include <vector>

#include "kvstore/memory/run_allocator.h"
#include "kvstore/memory/unit_range.h"

namespace pqcached::kvstore {

// Number of extents needed, by their size.
class ExtentDemand {
 public:
  // Units of an extent -> number of such extents; the longest first.
  using Counts = std::map<uint32_t, uint64_t, std::greater<>>;

  ExtentDemand() = default;
  // Adds one extent per size, each rounded up to whole units as Pool::Allocate does.
  explicit ExtentDemand(std::span<const size_t> sizes_bytes);

  void Add(size_t size_bytes, uint64_t extent_count = 1);

  // Returns the total size; saturates at the largest size_t.
  size_t bytes() const { return bytes_; }
  const Counts& counts() const { return counts_; }

 private:
  Counts counts_;
  size_t bytes_ = 0;
};

class FreeMap {
 public:
  // At most `limit_bytes` may be in use. `pinned_units`: first units of extents that remain in use
  // even after Free.
  FreeMap(RunAllocator units, size_t limit_bytes, std::unordered_set<uint32_t> pinned_units = {})
      : units_(std::move(units)),
        limit_bytes_(limit_bytes),
        pinned_units_(std::move(pinned_units)) {}

  // No effect if some of the units are free in the copy: a plan may name memory that was allocated
  // after the copy was made.
  //
  // Returns whether the units have become free.
  bool Free(UnitRange units);

  // Returns true when all extents could be allocated together.
  bool Fits(const ExtentDemand& demand) const;
  // Returns the bytes that are missing, in total or in contiguous pieces; 0 when the demand fits.
  size_t ShortfallBytes(const ExtentDemand& demand) const;

  size_t limit_bytes() const { return limit_bytes_; }
  size_t used_bytes() const { return size_t{units_.used_units()} << kExtentUnitShift; }
  size_t largest_free_bytes() const { return size_t{units_.longest_run()} << kExtentUnitShift; }

 private:
  RunAllocator units_;
  size_t limit_bytes_;
  std::unordered_set<uint32_t> pinned_units_;
};

}  // namespace pqcached::kvstore

#endif  // PQCACHED_KVSTORE_MEMORY_FREE_MAP_H_

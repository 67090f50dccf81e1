// FreeMap: a copy of the free extents of a pool, to compute which allocations would succeed after
// more extents are freed.
//
// Changes to the copy do not affect the pool. Thread-compatible.
#ifndef PQCACHED_KVSTORE_MEMORY_FREE_MAP_H_
#define PQCACHED_KVSTORE_MEMORY_FREE_MAP_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <set>
#include <span>
#include <unordered_set>
#include <utility>
#include <vector>

#include "kvstore/read/layout.h"

namespace pqcached::kvstore {

// Number of extents needed, per order.
class ExtentDemand {
 public:
  static constexpr uint32_t kOrderCount = 32;

  ExtentDemand() = default;
  // Adds one extent per size, each rounded up as Pool::Allocate does.
  explicit ExtentDemand(std::span<const size_t> sizes_bytes);

  void Add(size_t size_bytes, uint64_t extent_count = 1);

  // Returns the total size; saturates at the largest size_t.
  size_t bytes() const { return bytes_; }
  uint64_t count(uint32_t order) const { return counts_[order]; }

 private:
  std::array<uint64_t, kOrderCount> counts_ = {};
  size_t bytes_ = 0;
};

class FreeMap {
 public:
  // `free`: first units of the free extents, by order. At most `limit_bytes` may be in use.
  // `pinned_units`: first units of extents that remain in use even after Free.
  FreeMap(std::vector<std::set<uint32_t>> free, size_t used_bytes, size_t limit_bytes,
          std::unordered_set<uint32_t> pinned_units = {})
      : free_(std::move(free)),
        used_bytes_(used_bytes),
        limit_bytes_(limit_bytes),
        pinned_units_(std::move(pinned_units)) {}

  // REQUIRES: the extent is in use.
  void Free(ExtentRef extent);

  // Returns true when all extents could be allocated together.
  bool Fits(const ExtentDemand& demand) const;
  // Returns the bytes that are missing, in total or in contiguous pieces; 0 when the demand fits.
  size_t ShortfallBytes(const ExtentDemand& demand) const;

  size_t used_bytes() const { return used_bytes_; }
  size_t largest_free_bytes() const;

 private:
  std::vector<std::set<uint32_t>> free_;
  size_t used_bytes_;
  size_t limit_bytes_;
  std::unordered_set<uint32_t> pinned_units_;
};

// Returns the order of the smallest extent that holds `size_bytes`.
uint32_t OrderFor(size_t size_bytes);

}  // namespace pqcached::kvstore

#endif  // PQCACHED_KVSTORE_MEMORY_FREE_MAP_H_

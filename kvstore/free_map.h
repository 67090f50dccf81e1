// FreeMap: what is free in a pool, to find out what more free extents would make possible.
//
// A copy: nothing that happens to it happens to the pool. Thread-compatible.
#ifndef PQCACHED_KVSTORE_FREE_MAP_H_
#define PQCACHED_KVSTORE_FREE_MAP_H_

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

// How many extents of each order are wanted.
class ExtentDemand {
 public:
  static constexpr uint32_t kOrderCount = 32;

  ExtentDemand() = default;
  // Each size rounded up to an extent, as Pool::Allocate does.
  explicit ExtentDemand(std::span<const size_t> sizes_bytes);

  void Add(size_t size_bytes, uint64_t extent_count = 1);

  // The largest number there is when they are more.
  size_t bytes() const { return bytes_; }
  uint64_t count(uint32_t order) const { return counts_[order]; }

 private:
  std::array<uint64_t, kOrderCount> counts_ = {};
  size_t bytes_ = 0;
};

class FreeMap {
 public:
  // `free`: first units of free extents, by order. At most `limit_bytes` may be in use. `staying`: first
  // units of extents that stay in use, whoever frees them.
  FreeMap(std::vector<std::set<uint32_t>> free, size_t used_bytes, size_t limit_bytes,
          std::unordered_set<uint32_t> staying = {})
      : free_(std::move(free)),
        used_bytes_(used_bytes),
        limit_bytes_(limit_bytes),
        staying_(std::move(staying)) {}

  // REQUIRES: the extent is in use.
  void Free(ExtentRef extent);

  // Whether all of it would be granted at once.
  bool Fits(const ExtentDemand& demand) const;
  // Bytes that are missing for it: in all, or in one piece; 0 when it fits.
  size_t ShortfallBytes(const ExtentDemand& demand) const;

  size_t used_bytes() const { return used_bytes_; }
  size_t largest_free_bytes() const;

 private:
  std::vector<std::set<uint32_t>> free_;
  size_t used_bytes_;
  size_t limit_bytes_;
  std::unordered_set<uint32_t> staying_;
};

// The order of the extent that a size is given.
uint32_t OrderFor(size_t size_bytes);

}  // namespace pqcached::kvstore

#endif  // PQCACHED_KVSTORE_FREE_MAP_H_

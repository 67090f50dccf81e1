// BuddyAllocator: assigns the units of a heap of records to extents.
//
// Space is counted in *units*. An *extent* is 2^order units, aligned to its own size. Freeing an
// extent merges it with its buddy as long as the buddy is free. Allocate returns the lowest free
// extent of the smallest sufficient order, so that a half-empty pool stays dense at its start. The
// total number of units need not be a power of two.
//
// Thread-compatible.
#ifndef PQCACHED_KVSTORE_MEMORY_BUDDY_H_
#define PQCACHED_KVSTORE_MEMORY_BUDDY_H_

#include <cstdint>
#include <optional>
#include <set>
#include <unordered_map>
#include <vector>

namespace pqcached::kvstore {

class BuddyAllocator {
 public:
  // REQUIRES: unit_count <= 2^32 - 1.
  explicit BuddyAllocator(uint32_t unit_count);

  // Returns the first unit of an extent of 2^order units, or nothing when no free extent is large
  // enough.
  std::optional<uint32_t> Allocate(uint32_t order);

  // Allocates exactly this extent. Returns false when part of it is in use.
  bool Claim(uint32_t unit, uint32_t order);

  // Returns whether no part of this extent is in use.
  bool IsFree(uint32_t unit, uint32_t order) const;

  // REQUIRES: `unit` came from Allocate(order) or Claim and was not freed since.
  void Free(uint32_t unit, uint32_t order);

  uint64_t used_units() const { return used_units_; }
  uint64_t free_units() const { return unit_count_ - used_units_; }
  // Returns the size of the largest extent that Allocate would return; 0 when full.
  uint64_t largest_free_units() const;
  // Returns the first units of the free extents, indexed by order.
  const std::vector<std::set<uint32_t>>& free() const { return free_; }

 private:
  static constexpr uint32_t kOrderCount = 32;

  uint32_t unit_count_;
  uint64_t used_units_ = 0;
  std::vector<std::set<uint32_t>> free_;             // [order]: first units of free extents
  std::unordered_map<uint32_t, uint32_t> order_of_;  // first unit -> order of the allocated extents
};

}  // namespace pqcached::kvstore

#endif  // PQCACHED_KVSTORE_MEMORY_BUDDY_H_

// RunAllocator: assigns the units of a pool to extents.
//
// A *run* is a longest sequence of free units. Allocate takes the shortest run that is long enough;
// of several, the first. Long extents begin where the run begins, and short ones end where it ends,
// or where its first 64 MiB end: extents of one kind then lie together, fewer long runs are cut
// into pieces, and a pool is in use from its beginning on.
//
// Thread-compatible; copies are independent.
#ifndef PQCACHED_KVSTORE_MEMORY_RUN_ALLOCATOR_H_
#define PQCACHED_KVSTORE_MEMORY_RUN_ALLOCATOR_H_

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <utility>

#include "kvstore/memory/unit_range.h"

namespace pqcached::kvstore {

class RunAllocator {
 public:
  explicit RunAllocator(uint32_t unit_count);

  // Returns the first of `count` consecutive units, or nothing when no run is long enough. The
  // block by which an ExtentRef names them (of the next power of two) lies within the pool, too.
  // REQUIRES: count > 0.
  std::optional<uint32_t> Allocate(uint32_t count);
  // Allocates exactly these units. Returns false when one of them is in use, or there are none.
  bool Claim(UnitRange units);
  // REQUIRES: the units are in use.
  void Free(UnitRange units);

  // Allocates as many extents of `count` units each as Allocate would, at most `wanted`; returns
  // their number.
  uint64_t AllocateMany(uint32_t count, uint64_t wanted);

  bool IsFree(UnitRange units) const;
  // Returns whether all of these units are in use.
  bool IsUsed(UnitRange units) const;
  uint64_t used_units() const { return unit_count_ - free_units_; }
  uint64_t free_units() const { return free_units_; }
  // Returns the length of the longest run; 0 when no unit is free.
  uint32_t longest_run() const { return runs_.empty() ? 0 : runs_.rbegin()->first; }
  // Returns (length, first unit) of the runs, those first that are allocated first.
  const std::set<std::pair<uint32_t, uint32_t>>& runs() const { return runs_; }

 private:
  // Returns the first of `count` units of a run that suit; nothing when none do.
  std::optional<uint32_t> Place(UnitRange run, uint32_t count) const;
  // Takes the units out of the run that contains them.
  void Take(std::map<uint32_t, uint32_t>::iterator run, UnitRange units);
  void Add(UnitRange run);
  void Remove(std::map<uint32_t, uint32_t>::iterator run);

  uint32_t unit_count_;
  uint64_t free_units_ = 0;
  std::map<uint32_t, uint32_t> lengths_;          // first unit -> length of each run
  std::set<std::pair<uint32_t, uint32_t>> runs_;  // the same, by length
};

}  // namespace pqcached::kvstore

#endif  // PQCACHED_KVSTORE_MEMORY_RUN_ALLOCATOR_H_

// ExtentLedger records which extents of a pool are in use, in memory that outlives the process.
#ifndef PQCACHED_KVSTORE_MEMORY_EXTENT_LEDGER_H_
#define PQCACHED_KVSTORE_MEMORY_EXTENT_LEDGER_H_

#include <cstdint>

#include "kvstore/memory/unit_range.h"

namespace pqcached::kvstore {

// The pool calls all functions under its own lock; they must not call the pool.
class ExtentLedger {
 public:
  virtual ~ExtentLedger() = default;

  // Called before an extent is allocated.
  virtual void MarkUsed(UnitRange units) = 0;
  // Called before an extent returns to the free lists.
  virtual void MarkFree(UnitRange units) = 0;
  // Returns whether a unit is marked as used, possibly by an earlier process.
  virtual bool is_used(uint32_t unit) const = 0;
  // Returns whether the ledger is closed: extents that are freed later stay in use for the next
  // process.
  virtual bool detached() const = 0;
};

}  // namespace pqcached::kvstore

#endif  // PQCACHED_KVSTORE_MEMORY_EXTENT_LEDGER_H_

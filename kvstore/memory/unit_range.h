// UnitRange: consecutive units of a pool.
#ifndef PQCACHED_KVSTORE_MEMORY_UNIT_RANGE_H_
#define PQCACHED_KVSTORE_MEMORY_UNIT_RANGE_H_

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>

#include "kvstore/read/layout.h"

namespace pqcached::kvstore {

struct UnitRange {
  uint32_t begin = 0;
  uint32_t count = 0;

  size_t offset_bytes() const { return size_t{begin} << kExtentUnitShift; }
  size_t size_bytes() const { return size_t{count} << kExtentUnitShift; }
  friend bool operator==(const UnitRange&, const UnitRange&) = default;
};

// Returns the number of units that hold `size_bytes`; at least 1.
inline size_t UnitsFor(size_t size_bytes) {
  const size_t whole = size_bytes >> kExtentUnitShift;
  return std::max<size_t>(1, whole + (size_bytes % kMinExtentBytes != 0 ? 1 : 0));
}

// Returns the order of the smallest block, of 2^order units, that holds `size_bytes`.
inline uint32_t OrderFor(size_t size_bytes) {
  return static_cast<uint32_t>(std::bit_width(UnitsFor(size_bytes) - 1));
}

}  // namespace pqcached::kvstore

#endif  // PQCACHED_KVSTORE_MEMORY_UNIT_RANGE_H_

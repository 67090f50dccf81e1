// Adapts the pools to the memory limits of the machine and of control groups.
#ifndef PQCACHED_KVSTORE_EVICT_MEMORY_PRESSURE_H_
#define PQCACHED_KVSTORE_EVICT_MEMORY_PRESSURE_H_

#include <memory>
#include <span>

#include "kvstore/evict/evictor.h"
#include "kvstore/limits/memory_limits.h"
#include "kvstore/sequence/cache.h"

namespace pqcached::kvstore {

// Returns free pages to the machine that were not used lately (Pool::ReturnUnusedPages). When
// memory is short, also stops touching pages, returns other free pages, those of evicted
// retained sequences and those of page caches, and stops the pools from growing. Undoes the first
// and the last when it is not short.
void ApplyMemoryLimits(const MemoryLimits& limits,
                       std::span<const std::shared_ptr<const Cache>> caches, Evictor& evictor);

}  // namespace pqcached::kvstore

#endif  // PQCACHED_KVSTORE_EVICT_MEMORY_PRESSURE_H_

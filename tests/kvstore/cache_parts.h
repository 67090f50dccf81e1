// What the tests of the store's parts share: a cache without a store.
#ifndef PQCACHED_TESTS_KVSTORE_CACHE_PARTS_H_
#define PQCACHED_TESTS_KVSTORE_CACHE_PARTS_H_

#include <cstdint>

#include "kvstore/index/cost_model.h"
#include "kvstore/index/live_index.h"
#include "kvstore/sequence/cache.h"

namespace pqcached::kvstore::testing {

// The state that the caches of a store share, and the worker of its incremental indexes.
struct CacheParts {
  CacheParts(const StoreOptions& options, uint32_t threads)
      : compute(options.exec, threads),
        costs(options.exec, options.cost_file),
        segmenting(SegmentingOptions::Of(options)) {}

  Cache::Shared shared() { return {compute, costs, counters, segmenting}; }

  Compute compute;
  CostModel costs;
  SegmentCounters counters;
  SegmentingOptions segmenting;
  IncrementalIndexer live;
};

}  // namespace pqcached::kvstore::testing

#endif  // PQCACHED_TESTS_KVSTORE_CACHE_PARTS_H_

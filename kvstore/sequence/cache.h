// Cache: the state shared by all calls on the sequences of one KV space, or on the pages of a page
// cache.
#ifndef PQCACHED_KVSTORE_SEQUENCE_CACHE_H_
#define PQCACHED_KVSTORE_SEQUENCE_CACHE_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "kvstore/memory/compute.h"
#include "kvstore/memory/pool.h"
#include "kvstore/pages/keyed_pages.h"
#include "kvstore/records/record_table.h"
#include "kvstore/sequence/heat.h"
#include "kvstore/sequence/prefill_times.h"
#include "kvstore/sequence/prefix.h"
#include "kvstore/sequence/segment.h"
#include "kvstore/store.h"

namespace pqcached::kvstore {

class CostModel;

// The part of StoreOptions that decides how the rows and indexes of a cache are written, under the
// same names.
struct SegmentingOptions {
  uint32_t segment_tokens = 0;
  uint32_t tail_tokens = 0;
  uint32_t merge_segments = 0;
  uint32_t codebook_tokens = 0;
  uint32_t train_tokens = 0;
  double drift_ratio = 0;
  bool compare_repeats = false;
  PrefillCost prefill_cost;

  static SegmentingOptions Of(const StoreOptions& options);

  // Returns the capacity of a prefill segment for the tokens [first, end), or for the first of
  // them. It differs from that of any segment that Append opens, for IsTail.
  uint32_t PrefillTokens(uint32_t first, uint32_t end) const;
  // Returns the capacity of the next segment that Append opens: short sequences get short ones, but
  // not a small part of the rows of one call.
  uint32_t NextTailTokens(uint32_t stored_tokens, uint32_t new_tokens) const;
  // Returns whether a segment of this capacity has no more tokens than one that Append opens.
  bool IsTail(uint32_t slot_capacity) const {
    return slot_capacity <= tail_tokens &&
           (slot_capacity != segment_tokens || segment_tokens == tail_tokens);
  }
};

// Counters of all caches of a store. Thread-safe.
struct SegmentCounters {
  std::atomic<uint64_t> next_segment_id = 1;
  std::atomic<uint64_t> data_loss_count = 0;  // layers of segments and pages: checksum differed
};

// Immutable except for its pool, prefixes and prefill times; thread-safe.
struct Cache {
  uint64_t cache_id = 0;
  std::string tenant;
  CacheSpec spec;
  StoredLayers layers;
  std::shared_ptr<Pool> pool;
  Compute& compute;  // this and the next two are the store's, and outlive the cache
  CostModel& costs;
  SegmentCounters& counters;
  const SegmentingOptions segmenting;
  const std::shared_ptr<RecordTable> records;  // null: the cache is not persisted
  const std::shared_ptr<PrefixIndex> prefixes = std::make_shared<PrefixIndex>();
  const std::unique_ptr<UsageClock> uses = std::make_unique<UsageClock>();
  const std::unique_ptr<PrefillTimes> prefill_times;
  const std::unique_ptr<KeyedPages> pages;  // null in a cache of rows

  // The state that the caches of a store share.
  struct Shared {
    Compute& compute;
    CostModel& costs;
    SegmentCounters& counters;
    SegmentingOptions segmenting;
  };
  Cache(uint64_t id, std::string owner, CacheSpec cache_spec, std::shared_ptr<Pool> memory,
        const Shared& shared, std::shared_ptr<RecordTable> table = nullptr)
      : cache_id(id),
        tenant(std::move(owner)),
        spec(std::move(cache_spec)),
        layers(spec),
        pool(std::move(memory)),
        compute(shared.compute),
        costs(shared.costs),
        counters(shared.counters),
        segmenting(shared.segmenting),
        records(std::move(table)),
        prefill_times(
            std::make_unique<PrefillTimes>(shared.segmenting.prefill_cost, layers.size())),
        pages(spec.kind == CacheKind::kPages
                  ? std::make_unique<KeyedPages>(compute.exec, pool, records,
                                                 counters.data_loss_count)
                  : nullptr) {}

  // Returns the layer slot (ordinal among the stored layers) of an absolute layer. Errors:
  // kInvalidArgument naming the layer.
  absl::StatusOr<uint32_t> LayerSlot(uint32_t layer) const;
};

}  // namespace pqcached::kvstore

#endif  // PQCACHED_KVSTORE_SEQUENCE_CACHE_H_

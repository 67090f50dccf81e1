// Cache: the state shared by all calls on the sequences of one KV space. Engine: the state shared
// by all caches.
#ifndef PQCACHED_KVSTORE_CACHE_H_
#define PQCACHED_KVSTORE_CACHE_H_

#include <oneapi/tbb/global_control.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <thread>

#include "absl/status/statusor.h"
#include "kvstore/arena.h"
#include "kvstore/cost_model.h"
#include "kvstore/heat.h"
#include "kvstore/pool.h"
#include "kvstore/prefix.h"
#include "kvstore/record_table.h"
#include "kvstore/segment.h"
#include "kvstore/store.h"

namespace pqcached::kvstore {

class Checksums;
class IncrementalIndexer;

// Thread-safe.
struct Engine {
  Engine(const StoreOptions& store_options, uint32_t threads);
  ~Engine();

  const StoreOptions options;
  // Allows more threads than cores, when the options ask for them.
  std::optional<oneapi::tbb::global_control> more_threads;
  Arena serving;
  Arena building;
  ScratchPool scratch;
  std::atomic<uint64_t> next_segment_id = 1;
  std::atomic<uint64_t> data_loss_count = 0;  // layers of segments whose checksum differed
  CostModel costs;
  std::unique_ptr<IncrementalIndexer> live;  // its thread uses all members above
  std::unique_ptr<Checksums> checksums;      // null without a keeper
};

// Immutable except for its pool and prefixes; thread-safe.
struct Cache {
  uint64_t cache_id = 0;
  std::string tenant;
  CacheSpec spec;
  StoredLayers layers;
  std::shared_ptr<Pool> pool;
  Engine* engine = nullptr;                    // outlives the cache
  const std::shared_ptr<RecordTable> records;  // null: the cache is not persisted
  const std::shared_ptr<PrefixIndex> prefixes = std::make_shared<PrefixIndex>();
  const std::unique_ptr<UsageClock> uses = std::make_unique<UsageClock>();

  Cache(uint64_t id, std::string owner, CacheSpec cache_spec, std::shared_ptr<Pool> memory,
        Engine* shared, std::shared_ptr<RecordTable> table = nullptr)
      : cache_id(id),
        tenant(std::move(owner)),
        spec(std::move(cache_spec)),
        layers(spec),
        pool(std::move(memory)),
        engine(shared),
        records(std::move(table)) {}

  // Returns the layer slot (ordinal among the stored layers) of an absolute layer. Errors:
  // kInvalidArgument naming the layer.
  absl::StatusOr<uint32_t> LayerSlot(uint32_t layer) const;
};

}  // namespace pqcached::kvstore

#endif  // PQCACHED_KVSTORE_CACHE_H_

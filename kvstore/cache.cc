#include "kvstore/cache.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "kvstore/checksums.h"
#include "kvstore/live_index.h"
#include "kvstore/refusal.h"

namespace pqcached::kvstore {

Engine::Engine(const StoreOptions& store_options, uint32_t threads)
    : options(store_options),
      serving(threads, Arena::Priority::kServing),
      building(threads, Arena::Priority::kBuilding),
      costs(options.exec, options.cost_file),
      live(std::make_unique<IncrementalIndexer>(options.on_live_index_failure)),
      checksums(options.keeper == nullptr ? nullptr : std::make_unique<Checksums>()) {
  if (threads > std::thread::hardware_concurrency()) {
    more_threads.emplace(oneapi::tbb::global_control::max_allowed_parallelism, threads);
  }
}

Engine::~Engine() = default;

absl::StatusOr<uint32_t> Cache::LayerSlot(uint32_t layer) const {
  const auto it = std::lower_bound(
      layers.layers.begin(), layers.layers.end(), layer,
      [](const StoredLayers::Layer& stored, uint32_t wanted) { return stored.layer < wanted; });
  if (it == layers.layers.end() || it->layer != layer) {
    return InvalidArgument("layer",
                           absl::StrCat(layer, " is not a stored layer of cache ", spec.name));
  }
  return static_cast<uint32_t>(it - layers.layers.begin());
}

}  // namespace pqcached::kvstore

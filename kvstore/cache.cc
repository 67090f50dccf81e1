#include "kvstore/cache.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace pqcached::kvstore {

absl::StatusOr<uint32_t> Cache::LayerSlot(uint32_t layer) const {
  const auto it = std::lower_bound(
      layers.layers.begin(), layers.layers.end(), layer,
      [](const StoredLayers::Layer& stored, uint32_t wanted) { return stored.layer < wanted; });
  if (it == layers.layers.end() || it->layer != layer) {
    return absl::InvalidArgumentError(
        absl::StrCat("layer ", layer, " is not a stored layer of cache ", spec.name));
  }
  return static_cast<uint32_t>(it - layers.layers.begin());
}

}  // namespace pqcached::kvstore

#include "kvstore/sequence/cache.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "kvstore/refusal.h"

namespace pqcached::kvstore {

SegmentingOptions SegmentingOptions::Of(const StoreOptions& options) {
  return {.segment_tokens = options.segment_tokens,
          .tail_tokens = options.tail_tokens,
          .merge_segments = options.merge_segments,
          .codebook_tokens = options.codebook_tokens,
          .train_tokens = options.train_tokens,
          .drift_ratio = options.drift_ratio,
          .compare_repeats = options.compare_repeats,
          .prefill_cost = options.prefill_cost};
}

uint32_t SegmentingOptions::NextTailTokens(uint32_t stored_tokens) const {
  constexpr uint32_t kPartsOfSequence = 16;
  return std::min(std::max(RoundUpToBlock(stored_tokens / kPartsOfSequence), kBlockTokens),
                  tail_tokens);
}

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

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

uint32_t SegmentingOptions::PrefillTokens(uint32_t first, uint32_t end) const {
  const uint32_t least = tail_tokens + kBlockTokens;
  return std::min(segment_tokens, std::max(least, RoundUpToBlock(end - first)));
}

uint32_t SegmentingOptions::NextTailTokens(uint32_t stored_tokens, uint32_t new_tokens) const {
  constexpr uint32_t kPartsOfSequence = 16;
  const uint32_t wanted = RoundUpToBlock(std::max(stored_tokens / kPartsOfSequence, new_tokens));
  const uint32_t tokens = std::min(std::max(wanted, kBlockTokens), tail_tokens);
  // A segment of segment_tokens slots counts as one of the prefill (IsTail).
  return tokens == segment_tokens && tokens < tail_tokens ? tokens + kBlockTokens : tokens;
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

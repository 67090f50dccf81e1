#include "kvstore/store/prefix_sharing.h"

#include <algorithm>
#include <span>
#include <utility>
#include <vector>

namespace pqcached::kvstore {
namespace {

constexpr size_t kComparedHolders = 4;  // oldest and newest ones: a common prefix costs no more

// Shares the tokens of all these steps from a sequence that holds them, of several the one with the
// most indexes; null if there is none.
std::shared_ptr<const Snapshot> ShareSteps(const Cache& cache, std::span<const PrefixKey> keys) {
  std::shared_ptr<const Snapshot> best;
  const auto holders = cache.prefixes->Holders(keys.back());
  for (size_t i = 0; i < holders.size(); ++i) {
    const bool compared = i < kComparedHolders || i + kComparedHolders >= holders.size();
    if (!compared && best != nullptr) continue;
    auto snapshot = holders[i]->ShareStep(keys.size() - 1, keys.back());
    if (snapshot == nullptr) continue;
    if (best == nullptr || snapshot->list->indexes.size() > best->list->indexes.size()) {
      best = std::move(snapshot);
    }
  }
  return best;
}

}  // namespace

uint32_t PrefixSharing::Match(const std::shared_ptr<const Cache>& cache, const NameView& names,
                              std::string_view extra_key) const {
  const std::vector<std::shared_ptr<const Cache>> ranks = caches_.OfGroup(cache);
  if (ranks.size() < cache->spec.rank.rank_count) return 0;  // a missing rank holds nothing
  size_t steps = ~size_t{0};
  for (const auto& rank : ranks) {
    const PrefixKey root = PrefixRoot(rank->tenant, rank->spec, extra_key);
    steps = std::min(steps, rank->prefixes->Match(root, names).size());
  }
  return static_cast<uint32_t>(steps * kPrefixStepTokens);
}

RankPrefixes PrefixSharing::ShareInAllRanks(const std::shared_ptr<const Cache>& cache,
                                            const NameView& names,
                                            std::string_view extra_key) const {
  const std::vector<std::shared_ptr<const Cache>> ranks = caches_.OfGroup(cache);
  if (ranks.size() < cache->spec.rank.rank_count) return {};
  std::vector<std::vector<PrefixKey>> keys;
  size_t steps = ~size_t{0};
  for (const auto& rank : ranks) {
    const PrefixKey root = PrefixRoot(rank->tenant, rank->spec, extra_key);
    keys.push_back(rank->prefixes->Match(root, names));
    steps = std::min(steps, keys.back().size());
  }
  // Holders may be dropped or truncated concurrently; all ranks then share a shorter prefix.
  for (; steps > 0; --steps) {
    RankPrefixes shared;
    for (size_t i = 0; i < ranks.size(); ++i) {
      auto snapshot = ShareSteps(*ranks[i], std::span(keys[i]).first(steps));
      if (snapshot == nullptr) break;
      shared[ranks[i]->spec.rank.rank] = std::move(snapshot);
    }
    if (shared.size() == ranks.size()) return shared;
  }
  return {};
}

PrefixSharing::Prefix PrefixSharing::Share(const std::shared_ptr<const Cache>& cache,
                                           const NameView& names,
                                           std::string_view extra_key) const {
  Prefix prefix{.root = PrefixRoot(cache->tenant, cache->spec, extra_key), .snapshot = nullptr};
  if (names.token_count() < kPrefixStepTokens) return prefix;
  const uint32_t token_count =
      cache->spec.rank.group.empty() ? ~0u : Match(cache, names, extra_key);
  std::vector<PrefixKey> keys = cache->prefixes->Match(prefix.root, names);
  keys.resize(std::min<size_t>(keys.size(), token_count / kPrefixStepTokens));
  // Holders may be dropped or truncated concurrently; the prefix is then shorter.
  for (; !keys.empty() && prefix.snapshot == nullptr; keys.pop_back()) {
    prefix.snapshot = ShareSteps(*cache, keys);
  }
  return prefix;
}

void PrefixSharing::Count(const Cache& cache, const SequenceSpec& spec, const Snapshot* found) {
  prompt_tokens_ += NameView(spec).token_count() / kPrefixStepTokens * kPrefixStepTokens;
  if (found == nullptr) return;
  matched_tokens_ += found->token_count();
  const uint64_t tick = cache.uses->Tick();
  for (const SegmentEntry& entry : found->list->segments) {
    cache.uses->Use(tick, /*hit=*/true, entry.rows->heat());
  }
}

}  // namespace pqcached::kvstore

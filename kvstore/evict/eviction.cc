#include "kvstore/evict/eviction.h"

#include <algorithm>
#include <limits>
#include <unordered_map>

namespace pqcached::kvstore {
namespace {

// One step on a candidate, before the extents that it frees are known.
struct Cut {
  Victim victim;
  size_t segment_begin = 0;  // entries of the list that the step evicts
  size_t segment_end = 0;
};

// Counts down the remaining users of each part of a segment.
class FreedExtentCounter {
 public:
  FreedExtentCounter(const StoredLayers& layers, std::vector<UnitRange>& extents)
      : layers_(layers), extents_(&extents) {}

  void Collect(std::vector<UnitRange>& extents) { extents_ = &extents; }

  void Release(const SegmentEntry& entry) {
    if (!IsLast(entry.rows.get(), entry.rows->user_count())) return ReleaseIndexes(entry);
    for (uint32_t head = 0; head < layers_.head_count; ++head) {
      extents_->push_back(entry.rows->units(head));
    }
    ReleaseIndexes(entry);
  }

  void ReleaseSamples(const SegmentList& list) {
    for (const auto& samples : list.samples) {
      if (samples == nullptr || !IsLast(samples.get(), samples.use_count())) continue;
      const auto& extent = samples->extent();
      if (IsLast(extent.get(), extent.use_count())) extents_->push_back(extent->units());
    }
  }

 private:
  void ReleaseIndexes(const SegmentEntry& entry) {
    for (const auto& index : entry.indexes) {
      if (index == nullptr || !IsLast(index.get(), index.use_count())) continue;
      for (uint32_t slot = 0; slot < layers_.size(); ++slot) {
        const SegmentIndex::Layer& layer = index->layer(slot);
        if (layer.data != nullptr && IsLast(layer.data.get(), layer.data.use_count())) {
          extents_->push_back(layer.data->units());
        }
        if (layer.codebook != nullptr && IsLast(layer.codebook.get(), layer.codebook.use_count())) {
          extents_->push_back(layer.codebook->units());
        }
      }
    }
  }

  // Returns true when this user is the last of `users`; the count is recorded at the first call for
  // a part.
  template <typename Count>
  bool IsLast(const void* part, Count users) {
    const auto [left, added] = left_.try_emplace(part, static_cast<int64_t>(users));
    return --left->second == 0;
  }

  const StoredLayers& layers_;
  std::vector<UnitRange>* extents_;
  std::unordered_map<const void*, int64_t> left_;
};

// Cuts a cached prefix from its end. The score of a segment is the maximum over it and the segments
// after it, which are useless without it.
void CutRetained(size_t candidate, const SegmentList& list, EvictionPolicy policy,
                 std::vector<Cut>& cuts) {
  double score = -std::numeric_limits<double>::infinity();
  size_t end = list.segments.size();
  while (end > 0) {
    size_t begin = end - 1;
    score = std::max(score, UsageClock::Score(policy, list.segments[begin].rows->heat()));
    uint32_t keep_tokens = list.segments[begin].rows->first_position();
    if (keep_tokens < kBlockTokens) {  // a prefix this short cannot be matched
      for (; begin > 0; --begin) {
        score = std::max(score, UsageClock::Score(policy, list.segments[begin - 1].rows->heat()));
      }
      keep_tokens = 0;
    }
    cuts.push_back({.victim = {.candidate = candidate,
                               .keep_tokens = keep_tokens,
                               .score = score,
                               .extents = {}},
                    .segment_begin = begin,
                    .segment_end = end});
    end = begin;
  }
}

}  // namespace

size_t Victim::bytes() const {
  size_t bytes = 0;
  for (const UnitRange units : extents) bytes += units.size_bytes();
  return bytes;
}

std::vector<Victim> PlanEviction(std::span<const Candidate> candidates, const StoredLayers& layers,
                                 EvictionPolicy policy) {
  std::vector<std::shared_ptr<const Snapshot>> snapshots(candidates.size());
  std::vector<Cut> cuts;
  for (size_t i = 0; i < candidates.size(); ++i) {
    const auto snapshot = candidates[i].sequence->Peek();
    if (!snapshot.ok()) continue;  // dropped since the candidates were listed
    snapshots[i] = *snapshot;
    const SegmentList& list = *snapshots[i]->list;
    if (candidates[i].retained && !list.segments.empty()) {
      CutRetained(i, list, policy, cuts);
    } else {
      const double idle = absl::ToDoubleSeconds(candidates[i].sequence->holds().idle());
      cuts.push_back({.victim = {.candidate = i, .keep_tokens = 0, .score = -idle, .extents = {}},
                      .segment_begin = 0,
                      .segment_end = list.segments.size()});
    }
  }
  // The sort is stable, so that the end of a sequence is evicted before its beginning.
  std::stable_sort(cuts.begin(), cuts.end(), [&](const Cut& a, const Cut& b) {
    const bool a_retained = candidates[a.victim.candidate].retained;
    const bool b_retained = candidates[b.victim.candidate].retained;
    if (a_retained != b_retained) return a_retained;
    return a.victim.score < b.victim.score;
  });
  std::vector<Victim> victims;
  victims.reserve(cuts.size());
  std::vector<UnitRange> none;
  FreedExtentCounter releaser(layers, none);
  for (Cut& cut : cuts) {
    releaser.Collect(cut.victim.extents);
    const auto& segments = snapshots[cut.victim.candidate]->list->segments;
    for (size_t i = cut.segment_begin; i < cut.segment_end; ++i) releaser.Release(segments[i]);
    if (cut.segment_begin == 0) {
      releaser.ReleaseSamples(*snapshots[cut.victim.candidate]->list);
    }
    victims.push_back(std::move(cut.victim));
  }
  return victims;
}

std::optional<size_t> CountNeeded(const FreeMap& free, std::span<const Victim> victims,
                                  const ExtentDemand& demand) {
  const auto fits_after = [&](size_t count) {
    FreeMap map = free;
    for (const Victim& victim : victims.first(count)) {
      for (const UnitRange units : victim.extents) map.Free(units);
    }
    return map.Fits(demand);
  };
  size_t enough = 1;
  while (enough < victims.size() && !fits_after(enough)) enough *= 2;
  enough = std::min(enough, victims.size());
  if (!fits_after(enough)) return std::nullopt;
  size_t too_few = enough / 2;
  while (too_few + 1 < enough) {
    const size_t middle = (too_few + enough) / 2;
    (fits_after(middle) ? enough : too_few) = middle;
  }
  return enough;
}

}  // namespace pqcached::kvstore

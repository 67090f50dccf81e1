#include "kvstore/evict/evictor.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/base/status_macros.h"
#include "kvstore/memory/free_map.h"
#include "kvstore/refusal.h"

namespace pqcached::kvstore {

bool Evictor::IsEvictable(const StoredSequence& found) const {
  const auto is_free = [](const Sequence& sequence) {
    return !sequence.holds().held() && !sequence.holds().pinned();
  };
  if (!is_free(*found.sequence)) return false;
  if (found.retained()) return true;
  // Sequences of live sessions are evicted together over all ranks of a group, and only group keys
  // identify the members.
  if (!found.cache->spec.rank.group.empty() && found.sequence->group_key().empty()) return false;
  const RankSequences::Members members = parts_.ranks.MembersOf(*found.cache, found.sequence);
  return !members.joining &&
         std::all_of(members.alive.begin(), members.alive.end(), [&](const auto& member) {
           return is_free(*member) && member->holds().idle() >= parts_.options.evict_idle_after &&
                  parts_.live.IsIdle(member->sequence_id());
         });
}

std::vector<Candidate> Evictor::Candidates(const Cache& cache, bool retained_only) const {
  const bool idle_too = !retained_only && parts_.options.evict_idle_after > absl::ZeroDuration();
  std::vector<Candidate> candidates;
  for (const StoredSequence& found : idle_too ? parts_.sequences.OfCache(cache.cache_id)
                                              : parts_.sequences.RetainedOfCache(cache.cache_id)) {
    if (!IsEvictable(found)) continue;
    candidates.push_back({.sequence = found.sequence, .retained = found.retained()});
  }
  // Sorted by creation, so that the order of equal candidates is deterministic.
  std::sort(candidates.begin(), candidates.end(), [](const Candidate& a, const Candidate& b) {
    return a.sequence->sequence_id() < b.sequence->sequence_id();
  });
  return candidates;
}

std::vector<Victim> Evictor::Plan(const Cache& cache, std::span<const Candidate> candidates) const {
  return PlanEviction(candidates, cache.layers, parts_.options.eviction_policy);
}

// Checks first whether eviction frees enough, so that nothing is evicted in vain.
bool Evictor::MakeRoom(const Cache& cache, std::span<const size_t> sizes_bytes) {
  const ExtentDemand demand(sizes_bytes);
  const FreeMap free = cache.pool->free_map();
  if (free.Fits(demand)) return true;  // another thread has freed memory concurrently
  const std::vector<Candidate> candidates = Candidates(cache, /*retained_only=*/false);
  const std::vector<Victim> victims = Plan(cache, candidates);
  const std::optional<size_t> count = CountNeeded(free, victims, demand);
  if (!count.has_value()) return false;
  Execute(cache, candidates, std::span(victims).first(*count));
  return true;
}

size_t Evictor::Execute(const Cache& cache, std::span<const Candidate> candidates,
                        std::span<const Victim> victims) {
  size_t bytes = 0;
  for (const Victim& victim : victims) {
    if (!Execute(cache, candidates[victim.candidate], victim)) continue;  // in use again
    bytes += victim.bytes();
    evicted_bytes_ += victim.bytes();
  }
  return bytes;
}

absl::Status Evictor::EvictAllMembers(const StoredSequence& found) {
  ASSIGN_OR_RETURN(const auto claimed, parts_.ranks.Claim(*found.cache, found.sequence));
  for (const auto& sequence : claimed) {
    ++evicted_sequences_;
    parts_.sequences.RemoveEvicted(sequence->sequence_id());
    sequence->Drop();
  }
  return absl::OkStatus();
}

bool Evictor::Shorten(const StoredSequence& found, uint32_t keep_tokens) {
  if (keep_tokens == 0) return EvictAllMembers(found).ok();
  const auto lease = WriteLease::Acquire(found.sequence);
  return lease.ok() && !found.sequence->holds().pinned() &&
         found.sequence->Truncate(keep_tokens, /*own_lease=*/0).ok();
}

// Retained sequences of the other ranks with the same tokens are shortened, too: without the
// evicted one they are useless.
bool Evictor::Execute(const Cache& cache, const Candidate& candidate, const Victim& victim) {
  const auto found = parts_.sequences.FindInAnyTenant(candidate.sequence->sequence_id());
  if (!found.ok()) return false;
  std::vector<StoredSequence> counterparts;  // looked up before the names are removed
  if (candidate.retained) counterparts = RankCounterparts(cache, *found->names, victim.keep_tokens);
  if (!Shorten(*found, victim.keep_tokens)) return false;
  for (const StoredSequence& other : counterparts) {
    if (other.retained()) Shorten(other, victim.keep_tokens);
  }
  if (candidate.retained) cache.uses->OnEvict(victim.score);
  return true;
}

std::vector<StoredSequence> Evictor::RankCounterparts(const Cache& cache, const NamedTokens& names,
                                                      uint32_t keep_tokens) const {
  std::vector<StoredSequence> same;
  if (cache.spec.rank.group.empty()) return same;
  NameWords first = names.ListedNames();
  const size_t words = WordsOf(first.kind, keep_tokens + kPrefixStepTokens);
  if (first.words.size() < words) return same;
  first.words.resize(words);
  for (StoredSequence& other : parts_.sequences.OfOtherRanks(cache)) {
    if (other.names->BeginsWith(first)) same.push_back(std::move(other));
  }
  return same;
}

void Evictor::MakeRoomForOne(const Cache& cache) {
  if (parts_.sequences.CountOfCache(cache.cache_id) < parts_.options.max_sequences) return;
  const std::vector<Candidate> candidates = Candidates(cache, /*retained_only=*/true);
  std::vector<Victim> victims = Plan(cache, candidates);
  // Evicted as a whole, because a shortened sequence counts, too.
  for (Victim& victim : victims) {
    victim.keep_tokens = 0;
    if (Execute(cache, candidates[victim.candidate], victim)) return;
  }
}

size_t Evictor::ShrinkRetained(const Cache& cache, size_t most_bytes) {
  const std::vector<Candidate> candidates = Candidates(cache, /*retained_only=*/true);
  const std::vector<Victim> victims = Plan(cache, candidates);
  size_t held_bytes = 0;
  for (const Victim& victim : victims) held_bytes += victim.bytes();
  size_t count = 0;
  for (; count < victims.size() && held_bytes > most_bytes; ++count) {
    held_bytes -= victims[count].bytes();
  }
  return Execute(cache, candidates, std::span(victims).first(count));
}

size_t Evictor::RetainedBytes(const Cache& cache) const {
  size_t bytes = 0;
  for (const Victim& victim : Plan(cache, Candidates(cache, /*retained_only=*/true))) {
    bytes += victim.bytes();
  }
  return bytes;
}

size_t Evictor::FreeRetained(const Cache& cache, size_t bytes) {
  const std::vector<Candidate> candidates = Candidates(cache, /*retained_only=*/true);
  size_t freed_bytes = 0;
  for (const Victim& victim : Plan(cache, candidates)) {
    if (freed_bytes >= bytes) break;
    freed_bytes += Execute(cache, candidates, {&victim, 1});
  }
  return freed_bytes;
}

absl::Status Evictor::CheckUnused(std::span<const std::shared_ptr<Sequence>> sequences) const {
  const std::vector<LeaseInfo> leases = parts_.local.ListLeases(kAllTenants);
  for (const auto& sequence : sequences) {
    const uint64_t sequence_id = sequence->sequence_id();
    for (const LeaseInfo& lease : leases) {
      if (lease.sequence_id != sequence_id) continue;
      return FailedPrecondition("sequence_id",
                                absl::StrCat("sequence ", sequence_id, ": lease ", lease.lease_id,
                                             " of session ", lease.session, " holds it"));
    }
    if (!sequence->holds().pinned()) continue;
    return FailedPrecondition(
        "sequence_id", absl::StrCat("sequence ", sequence_id, ": it is pinned for another ",
                                    absl::ToDoubleSeconds(sequence->holds().pin_left()), " s"));
  }
  return absl::OkStatus();
}

absl::Status Evictor::Evict(const StoredSequence& found) {
  const RankSequences::Members members = parts_.ranks.MembersOf(*found.cache, found.sequence);
  RETURN_IF_ERROR(CheckUnused(members.alive));
  const Candidate candidate{.sequence = found.sequence, .retained = found.retained()};
  const std::vector<Victim> victims = Plan(*found.cache, {&candidate, 1});
  const std::vector<StoredSequence> counterparts = RankCounterparts(*found.cache, *found.names, 0);
  RETURN_IF_ERROR(EvictAllMembers(found));
  for (const Victim& victim : victims) evicted_bytes_ += victim.bytes();
  for (const StoredSequence& other : counterparts) {
    if (candidate.retained && other.retained()) EvictAllMembers(other).IgnoreError();
  }
  return absl::OkStatus();
}

}  // namespace pqcached::kvstore

// Store's work under memory pressure: retention, eviction and admission.
#include <malloc.h>

#include <algorithm>
#include <limits>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kvstore/builder.h"
#include "kvstore/live_index.h"
#include "kvstore/memory_limits.h"
#include "kvstore/refusal.h"
#include "kvstore/store_impl.h"

namespace pqcached::kvstore {
namespace {

// Memory is short when less than this is left in the machine or in a control group.
constexpr size_t kShortBytes = size_t{64} << 20;

uint64_t CeilDiv(uint64_t a, uint64_t b) { return (a + b - 1) / b; }

// Returns the number of codebook generations that SplitGenerations (builder.h) makes of segments
// that are all full except the last.
uint64_t GenerationCount(uint64_t tokens, uint64_t segment_tokens, uint64_t codebook_tokens) {
  const uint64_t segments = CeilDiv(codebook_tokens, segment_tokens);
  const uint64_t whole = tokens / (segments * segment_tokens);
  const uint64_t left = tokens % (segments * segment_tokens);
  return std::max<uint64_t>(1, whole + (left >= codebook_tokens ? 1 : 0));
}

void AddSegments(const Cache& cache, const IndexDescriptor& index, uint32_t slot_capacity,
                 uint64_t segment_count, ExtentDemand& demand) {
  std::vector<size_t> sizes_bytes;
  SegmentRows::AppendSizes(cache.layers, slot_capacity, sizes_bytes);
  if (index.kind != IndexKind::kFlat) {
    SegmentIndex::AppendSizes(cache.layers, index, slot_capacity, sizes_bytes);
  }
  for (const size_t size_bytes : sizes_bytes) demand.Add(size_bytes, segment_count);
}

// Returns the extents that a prefill with its index, and the active segments after it, will
// allocate.
ExtentDemand DemandOf(const Cache& cache, const AdmitSpec& spec, const IndexDescriptor& index) {
  const StoreOptions& options = cache.engine->options;
  ExtentDemand demand;
  AddSegments(cache, index, options.segment_tokens,
              CeilDiv(spec.prefill_tokens, options.segment_tokens), demand);
  AddSegments(cache, index, options.tail_tokens, CeilDiv(spec.output_tokens, options.tail_tokens),
              demand);
  if (index.kind == IndexKind::kFlat || spec.prefill_tokens == 0) return demand;
  const uint64_t generations = GenerationCount(
      spec.prefill_tokens, options.segment_tokens,
      MinGenerationTokens(static_cast<uint32_t>(spec.prefill_tokens), options.codebook_tokens));
  for (const StoredLayers::Layer& layer : cache.layers.layers) {
    demand.Add(Codebook::SizeBytes(index, layer.shape), generations);
  }
  return demand;
}

}  // namespace

void StoreImpl::InstallReclaimer(const std::shared_ptr<const Cache>& cache) {
  cache->pool->SetReclaimer([this, weak = std::weak_ptr(cache)](std::span<const size_t> sizes) {
    const std::shared_ptr<const Cache> alive = weak.lock();
    return alive != nullptr && MakeRoom(*alive, sizes);
  });
}

void StoreImpl::RemoveReclaimers() {
  watch_.reset();
  for (const auto& cache : AllCaches()) cache->pool->SetReclaimer({});
}

absl::Status StoreImpl::CheckTenantQuota(std::string_view tenant, size_t capacity_bytes) {
  const StoreOptions& options = engine_->options;
  if (options.tenant_quotas.empty()) return absl::OkStatus();
  std::map<std::string, size_t, std::less<>> open_bytes;
  size_t all_bytes = 0;
  for (const auto& [id, cache] : caches_) {
    const size_t bytes = cache->pool->usage().capacity_bytes;
    open_bytes[cache->tenant] += bytes;
    all_bytes += bytes;
  }
  const auto open_of = [&](std::string_view of) {
    const auto it = open_bytes.find(of);
    return it == open_bytes.end() ? size_t{0} : it->second;
  };
  const auto left_of = [](size_t limit, size_t used) { return limit - std::min(limit, used); };
  if (const auto quota = options.tenant_quotas.find(tenant); quota != options.tenant_quotas.end()) {
    const size_t left = left_of(quota->second.max_bytes, open_of(tenant));
    if (capacity_bytes > left) {
      return ResourceExhausted("capacity_bytes",
                               absl::StrCat(capacity_bytes, "; the quota of tenant ", quota->first,
                                            " is ", quota->second.max_bytes, " and leaves ", left,
                                            ", ", capacity_bytes - left, " bytes short"),
                               kRetryMemory);
    }
  }
  size_t guaranteed_bytes = 0;  // guaranteed to others and not open yet
  for (const auto& [name, quota] : options.tenant_quotas) {
    if (name != tenant) guaranteed_bytes += left_of(quota.guaranteed_bytes, open_of(name));
  }
  const size_t left = left_of(left_of(options.max_pool_bytes, all_bytes), guaranteed_bytes);
  if (capacity_bytes <= left) return absl::OkStatus();
  return ResourceExhausted(
      "capacity_bytes",
      absl::StrCat(capacity_bytes, "; max_pool_bytes leaves ", left, " in addition to ",
                   guaranteed_bytes, " that other tenants are guaranteed, ", capacity_bytes - left,
                   " bytes short"),
      kRetryMemory);
}

std::vector<StoreImpl::Found> StoreImpl::SequencesOf(const Cache& cache, bool retained_only) const {
  std::vector<Found> all;
  const MutexLock lock(&mutex_);
  for (const auto& [id, found] : sequences_) {
    if (found.cache->cache_id != cache.cache_id) continue;
    if (!retained_only || found.retained()) all.push_back(found);
  }
  return all;
}

bool StoreImpl::IsEvictable(const Found& found) const {
  const auto is_free = [](const Sequence& sequence) {
    return !sequence.holds().held() && !sequence.holds().pinned();
  };
  if (!is_free(*found.sequence)) return false;
  if (found.retained()) return true;
  // Sequences of live sessions are evicted together over all ranks of a group, and only group keys
  // identify the members.
  if (!found.cache->spec.rank.group.empty() && found.sequence->group_key().empty()) return false;
  const RankSequences::Members members = rank_sequences_.MembersOf(*found.cache, found.sequence);
  return !members.joining &&
         std::all_of(members.alive.begin(), members.alive.end(), [&](const auto& member) {
           return is_free(*member) && member->holds().idle() >= engine_->options.evict_idle_after &&
                  engine_->live->IsIdle(member->sequence_id());
         });
}

std::vector<Candidate> StoreImpl::Candidates(const Cache& cache, bool retained_only) const {
  const bool idle_too = !retained_only && engine_->options.evict_idle_after > absl::ZeroDuration();
  std::vector<Candidate> candidates;
  for (const Found& found : SequencesOf(cache, !idle_too)) {
    if (!IsEvictable(found)) continue;
    candidates.push_back({.sequence = found.sequence, .retained = found.retained()});
  }
  // Sorted by creation, so that the order of equal candidates is deterministic.
  std::sort(candidates.begin(), candidates.end(), [](const Candidate& a, const Candidate& b) {
    return a.sequence->sequence_id() < b.sequence->sequence_id();
  });
  return candidates;
}

// Checks first whether eviction frees enough, so that nothing is evicted in vain.
bool StoreImpl::MakeRoom(const Cache& cache, std::span<const size_t> sizes_bytes) {
  const ExtentDemand demand(sizes_bytes);
  FreeMap free = cache.pool->free_map();
  if (free.Fits(demand)) return true;  // another thread has freed memory concurrently
  const std::vector<Candidate> candidates = Candidates(cache, /*retained_only=*/false);
  const std::vector<Victim> victims =
      PlanEviction(candidates, cache.layers, engine_->options.eviction_policy);
  size_t count = 0;
  while (count < victims.size() && !free.Fits(demand)) {
    for (const ExtentRef extent : victims[count].extents) free.Free(extent);
    ++count;
  }
  if (!free.Fits(demand)) return false;
  ExecuteEviction(cache, candidates, std::span(victims).first(count));
  return true;
}

size_t StoreImpl::ExecuteEviction(const Cache& cache, std::span<const Candidate> candidates,
                                  std::span<const Victim> victims) {
  size_t bytes = 0;
  for (const Victim& victim : victims) {
    if (!ExecuteEviction(cache, candidates[victim.candidate], victim)) continue;  // in use again
    bytes += victim.bytes();
    evicted_bytes_ += victim.bytes();
  }
  return bytes;
}

absl::Status StoreImpl::EvictAllMembers(const Found& found) {
  const auto claimed = rank_sequences_.Claim(*found.cache, found.sequence);
  if (!claimed.ok()) return claimed.status();
  for (const auto& sequence : *claimed) {
    evicted_.Add(sequence->sequence_id());
    ++evicted_sequences_;
    RemoveFromMap(sequence->sequence_id());
    sequence->Drop();
  }
  return absl::OkStatus();
}

bool StoreImpl::Shorten(const Found& found, uint32_t keep_tokens) {
  if (keep_tokens == 0) return EvictAllMembers(found).ok();
  const auto lease = WriteLease::Acquire(found.sequence);
  return lease.ok() && !found.sequence->holds().pinned() &&
         found.sequence->Truncate(keep_tokens, /*own_lease=*/0).ok();
}

// Retained sequences of the other ranks with the same tokens are shortened, too: without the
// evicted one they are useless.
bool StoreImpl::ExecuteEviction(const Cache& cache, const Candidate& candidate,
                                const Victim& victim) {
  const auto found = FindInAnyTenant(candidate.sequence->sequence_id());
  if (!found.ok()) return false;
  std::vector<Found> counterparts;  // looked up before the names are removed
  if (candidate.retained) counterparts = RankCounterparts(cache, *found->names, victim.keep_tokens);
  if (!Shorten(*found, victim.keep_tokens)) return false;
  for (const Found& other : counterparts) {
    if (other.retained()) Shorten(other, victim.keep_tokens);
  }
  if (candidate.retained) cache.uses->OnEvict(victim.score);
  return true;
}

std::vector<StoreImpl::Found> StoreImpl::RankCounterparts(const Cache& cache,
                                                          const NamedTokens& names,
                                                          uint32_t keep_tokens) const {
  std::vector<Found> same;
  const std::string& group = cache.spec.rank.group;
  if (group.empty()) return same;
  std::vector<uint32_t> ids = names.ListedIds();
  if (ids.size() < keep_tokens + kPrefixStepTokens) return same;
  ids.resize(keep_tokens + kPrefixStepTokens);
  std::vector<Found> others;
  {
    const MutexLock lock(&mutex_);
    for (const auto& [id, found] : sequences_) {
      const Cache& other = *found.cache;
      if (other.cache_id != cache.cache_id && other.tenant == cache.tenant &&
          other.spec.name == cache.spec.name && other.spec.rank.group == group) {
        others.push_back(found);
      }
    }
  }
  for (Found& found : others) {
    if (found.names->BeginsWith(ids)) same.push_back(std::move(found));
  }
  return same;
}

void StoreImpl::EvictForCount(const Cache& cache) {
  {
    const MutexLock lock(&mutex_);
    const auto count = sequence_counts_.find(cache.cache_id);
    if (count == sequence_counts_.end() || count->second < engine_->options.max_sequences) return;
  }
  const std::vector<Candidate> candidates = Candidates(cache, /*retained_only=*/true);
  std::vector<Victim> victims =
      PlanEviction(candidates, cache.layers, engine_->options.eviction_policy);
  // Evicted as a whole, because a shortened sequence counts, too.
  for (Victim& victim : victims) {
    victim.keep_tokens = 0;
    if (ExecuteEviction(cache, candidates[victim.candidate], victim)) return;
  }
}

size_t StoreImpl::ShrinkRetained(const Cache& cache, size_t most_bytes) {
  const std::vector<Candidate> candidates = Candidates(cache, /*retained_only=*/true);
  const std::vector<Victim> victims =
      PlanEviction(candidates, cache.layers, engine_->options.eviction_policy);
  size_t held_bytes = 0;
  for (const Victim& victim : victims) held_bytes += victim.bytes();
  size_t count = 0;
  for (; count < victims.size() && held_bytes > most_bytes; ++count) {
    held_bytes -= victims[count].bytes();
  }
  return ExecuteEviction(cache, candidates, std::span(victims).first(count));
}

void StoreImpl::EndSequence(const Found& found) {
  if (engine_->options.retain && !found.retained()) return Retain(found);
  RemoveFromMap(found.sequence->sequence_id());
  found.sequence->Drop();  // a writer in progress fails when it publishes
  rank_sequences_.Ended(*found.cache, *found.sequence);
}

// Retains the tokens in a new sequence without a session. It has a new id, so that calls with the
// old id fail, as after any drop.
void StoreImpl::Retain(const Found& found) {
  const Cache& cache = *found.cache;
  const MutexLock lock(&retain_mutex_);
  std::vector<PrefixKey> keys = found.names->ListedKeys();
  uint32_t closed_end = 0;
  if (const auto snapshot = found.sequence->Peek(); snapshot.ok()) {
    // Excludes the open segment: it holds memory for tokens that will not be written.
    closed_end = std::min((*snapshot)->active_begin(), (*snapshot)->token_count());
  }
  keys.resize(std::min<size_t>(keys.size(), closed_end / kPrefixStepTokens));
  absl::StatusOr<NamedTokens::Shared> kept = NotFound("", "nothing to retain");
  if (!keys.empty() && cache.prefixes->Holders(keys.back()).size() < 2) {
    kept = found.names->Share(static_cast<uint32_t>(keys.size() * kPrefixStepTokens),
                              /*partial_indexes=*/false);
  }
  const int64_t pinned_until = found.sequence->holds().pinned_until();
  const PrefixKey root = found.names->root();
  RemoveFromMap(found.sequence->sequence_id());
  found.sequence->Drop();  // a writer in progress fails when it publishes
  rank_sequences_.Ended(cache, *found.sequence);
  if (!kept.ok()) return;
  const uint64_t tick = cache.uses->Tick();
  for (const SegmentEntry& entry : kept->snapshot->list->segments) {
    cache.uses->Use(tick, /*hit=*/false, entry.rows->heat());
  }
  const auto made = AddSequence(found.cache, {.session = {},
                                              .first = std::move(kept->snapshot),
                                              .root = root,
                                              .token_ids = kept->token_ids});
  if (!made.ok()) return;  // max_sequences reached, and all sequences are in use
  const auto retained = FindInAnyTenant(made->sequence_id);
  if (!retained.ok()) return;
  if (pinned_until > BootNanos()) {
    retained->sequence->PinUntil(pinned_until).IgnoreError();  // if this fails, it may be evicted
  }
  // Drops shorter retained sequences with the same beginning, which are now redundant.
  for (const Found& other : SequencesOf(cache, /*retained_only=*/true)) {
    if (other.sequence == retained->sequence) continue;
    const std::vector<PrefixKey> theirs = other.names->ListedKeys();
    if (theirs.size() > keys.size() || !std::equal(theirs.begin(), theirs.end(), keys.begin()) ||
        !other.sequence->holds().Claim()) {
      continue;
    }
    RemoveFromMap(other.sequence->sequence_id());
    other.sequence->Drop();
  }
  const PoolUsage usage = cache.pool->usage();
  const auto most_bytes = static_cast<size_t>(static_cast<double>(usage.capacity_bytes) *
                                              engine_->options.max_retained_share);
  if (usage.used_bytes > most_bytes) ShrinkRetained(cache, most_bytes);
}

absl::StatusOr<Admission> StoreImpl::Admit(std::string_view tenant, uint64_t cache_id,
                                           const AdmitSpec& spec) {
  const auto found = FindCache(tenant, cache_id);
  if (!found.ok()) return found.status();
  const Cache& cache = **found;
  if (spec.prefill_tokens > kMaxSequenceTokens || spec.output_tokens > kMaxSequenceTokens ||
      spec.prefill_tokens + spec.output_tokens > kMaxSequenceTokens) {
    return OutOfRange("token_count",
                      absl::StrCat(spec.prefill_tokens, ", with ", spec.output_tokens,
                                   " of output; a sequence has at most ", kMaxSequenceTokens));
  }
  const IndexDescriptor index = spec.index.value_or(cache.spec.default_index);
  for (const StoredLayers::Layer& layer : cache.layers.layers) {
    if (absl::Status status = ValidateIndex(index, layer.shape.key_dim, "index"); !status.ok()) {
      return status;
    }
  }
  const ExtentDemand demand = DemandOf(cache, spec, index);
  const PoolUsage usage = cache.pool->usage();
  FreeMap free = cache.pool->free_map();
  Admission admission{.needed_bytes = demand.bytes(), .limit_bytes = usage.limit_bytes};
  const BuddyAllocator empty(static_cast<uint32_t>(usage.capacity_bytes >> kExtentUnitShift));
  const FreeMap most(empty.free(), 0, usage.limit_bytes);
  if (!most.Fits(demand)) {
    admission.verdict = Verdict::kExceedsCapacity;
    admission.shortfall_bytes = most.ShortfallBytes(demand);
    return admission;
  }
  if (free.Fits(demand)) {
    admission.verdict = Verdict::kFitsNow;
    return admission;
  }
  const std::vector<Candidate> candidates = Candidates(cache, /*retained_only=*/false);
  for (const Victim& victim :
       PlanEviction(candidates, cache.layers, engine_->options.eviction_policy)) {
    for (const ExtentRef extent : victim.extents) free.Free(extent);
    admission.bytes_to_evict += victim.bytes();
    if (!free.Fits(demand)) continue;
    admission.verdict = Verdict::kFitsAfterEviction;
    return admission;
  }
  admission.verdict = Verdict::kRetryable;
  admission.bytes_to_evict = 0;
  admission.shortfall_bytes = free.ShortfallBytes(demand);
  return admission;
}

absl::Status StoreImpl::PinSequence(std::string_view tenant, uint64_t sequence_id,
                                    absl::Duration ttl) {
  if (ttl < absl::ZeroDuration() || ttl > Holds::kLongestPin) {
    return InvalidArgument("ttl", absl::StrCat(absl::ToDoubleSeconds(ttl), " s, must lie in [0, ",
                                               absl::ToDoubleSeconds(Holds::kLongestPin), "]"));
  }
  const auto found = tenant.empty() ? FindInAnyTenant(sequence_id) : Find(tenant, sequence_id);
  if (!found.ok()) return found.status();
  const int64_t until =
      ttl > absl::ZeroDuration() ? BootNanos() + absl::ToInt64Nanoseconds(ttl) : 0;
  if (absl::Status status = found->sequence->PinUntil(until); !status.ok()) return status;
  if (found->sequence->holds().claimed()) {
    return NotFound("sequence_id", absl::StrCat("sequence ", sequence_id, " was evicted"));
  }
  std::vector<std::shared_ptr<Sequence>> others =
      rank_sequences_.MembersOf(*found->cache, found->sequence).alive;
  others.erase(others.begin());  // the sequence itself
  for (const Found& other : RankCounterparts(*found->cache, *found->names, 0)) {
    others.push_back(other.sequence);
  }
  for (const auto& other : others) {
    if (absl::Status status = other->PinUntil(until); !status.ok() && !absl::IsNotFound(status)) {
      return status;
    }
  }
  return absl::OkStatus();
}

absl::Status StoreImpl::CheckUnused(std::span<const std::shared_ptr<Sequence>> sequences) {
  const std::vector<LeaseInfo> leases = local_.ListLeases();
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

absl::Status StoreImpl::EvictSequence(uint64_t sequence_id) {
  const auto found = FindInAnyTenant(sequence_id);
  if (!found.ok()) return found.status();
  const RankSequences::Members members = rank_sequences_.MembersOf(*found->cache, found->sequence);
  if (absl::Status status = CheckUnused(members.alive); !status.ok()) return status;
  const Candidate candidate{.sequence = found->sequence, .retained = found->retained()};
  const std::vector<Victim> victims =
      PlanEviction({&candidate, 1}, found->cache->layers, engine_->options.eviction_policy);
  const std::vector<Found> counterparts = RankCounterparts(*found->cache, *found->names, 0);
  if (absl::Status status = EvictAllMembers(*found); !status.ok()) return status;
  for (const Victim& victim : victims) evicted_bytes_ += victim.bytes();
  for (const Found& other : counterparts) {
    if (candidate.retained && other.retained()) EvictAllMembers(other).IgnoreError();
  }
  return absl::OkStatus();
}

void StoreImpl::ApplyMemoryLimits() {
  const MemoryLimits limits = ReadMemoryLimits(engine_->options.memory_root);
  const bool is_short = limits.excess_bytes > 0 || limits.available_bytes < kShortBytes;
  if (is_short) malloc_trim(0);
  const std::vector<std::shared_ptr<const Cache>> caches = AllCaches();
  size_t left_bytes = limits.excess_bytes;
  const auto give_back = [&](Pool& pool) {
    if (left_bytes > 0) left_bytes -= std::min(left_bytes, pool.ReturnFreePages(left_bytes));
  };
  for (const auto& cache : caches) {
    cache->pool->PauseTouching(is_short);
    give_back(*cache->pool);  // free pages first
  }
  for (const auto& cache : caches) {
    if (left_bytes == 0) break;
    std::vector<Candidate> candidates = Candidates(*cache, /*retained_only=*/true);
    size_t freed_bytes = 0;
    for (const Victim& victim :
         PlanEviction(candidates, cache->layers, engine_->options.eviction_policy)) {
      if (freed_bytes >= left_bytes) break;
      freed_bytes += ExecuteEviction(*cache, candidates, {&victim, 1});
    }
    give_back(*cache->pool);
  }
  for (const auto& cache : caches) {
    Pool& pool = *cache->pool;
    if (!is_short) {
      pool.SetUseLimit(std::numeric_limits<size_t>::max(), {});
    } else if (const size_t absent_bytes = pool.absent_bytes(); absent_bytes > 0) {
      pool.SetUseLimit(pool.usage().capacity_bytes - absent_bytes,
                       absl::StrCat("; memory is short: ", limits.source));
    }
  }
}

}  // namespace pqcached::kvstore

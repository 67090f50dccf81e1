// Store's calls that create and change sequences.
#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kvstore/builder.h"
#include "kvstore/checksums.h"
#include "kvstore/ingest.h"
#include "kvstore/live_index.h"
#include "kvstore/refusal.h"
#include "kvstore/sequence_record.h"
#include "kvstore/store_impl.h"

namespace pqcached::kvstore {
namespace {

// Shares the tokens of all these steps from a sequence that holds them; null if there is none.
std::shared_ptr<const Snapshot> ShareSteps(const Cache& cache, std::span<const PrefixKey> keys) {
  for (const auto& holder : cache.prefixes->Holders(keys.back())) {
    auto snapshot = holder->ShareStep(keys.size() - 1, keys.back());
    if (snapshot != nullptr) return snapshot;
  }
  return nullptr;
}

}  // namespace

absl::StatusOr<CreatedSequence> StoreImpl::AddSequence(std::shared_ptr<const Cache> cache,
                                                       NewSequence made) {
  const uint64_t cache_id = cache->cache_id;
  uint64_t sequence_id = 0;
  EvictForCount(*cache);
  {
    const MutexLock lock(&mutex_);
    uint32_t& count = sequence_counts_[cache_id];
    if (count >= engine_->options.max_sequences) {
      return ResourceExhausted("max_sequences",
                               absl::StrCat("cache ", cache_id, " has ", count, " sequences"),
                               kRetryMemory);
    }
    ++count;
    sequence_id = NewId();
  }
  std::shared_ptr<const Snapshot> first = std::move(made.first);
  if (first == nullptr) {
    first = std::make_shared<const Snapshot>(std::make_shared<SegmentList>(),
                                             std::vector<uint32_t>(cache->layers.size(), 0));
  }
  const uint32_t token_count = first->token_count();
  std::unique_ptr<SequenceRecord> record;
  std::unique_ptr<NamesRecord> names_record;
  absl::Status status;
  if (cache->records != nullptr) {
    auto created = SequenceRecord::Create(cache->records,
                                          {.sequence_id = sequence_id,
                                           .session = made.session,
                                           .root = made.root,
                                           .live_index = made.live_index,
                                           .group_key = made.group_key},
                                          *first);
    status = created.status();
    if (status.ok()) {
      record = *std::move(created);
      names_record = std::make_unique<NamesRecord>(cache->records, record->slot());
    }
  }
  auto sequence = std::make_shared<Sequence>(sequence_id, std::move(made.session),
                                             Sequence::Start{.first = std::move(first),
                                                             .record = std::move(record),
                                                             .views = {},
                                                             .group_key = made.group_key});
  auto names = std::make_shared<NamedTokens>(cache->prefixes, made.root, sequence, token_count,
                                             std::move(names_record));
  if (status.ok()) status = sequence->Watch(names).status();
  if (status.ok()) status = names->Name(0, made.token_ids);
  if (status.ok() && cache->records != nullptr) engine_->checksums->Add(cache, sequence);
  if (!status.ok()) sequence->Drop();
  const MutexLock lock(&mutex_);
  if (!status.ok()) {
    --sequence_counts_[cache_id];
    return status;
  }
  sequences_.emplace(sequence_id, Found{std::move(cache), std::move(sequence), std::move(names)});
  return CreatedSequence{.sequence_id = sequence_id, .token_count = token_count};
}

std::vector<std::shared_ptr<const Cache>> StoreImpl::CachesOfGroup(
    const std::shared_ptr<const Cache>& cache) const {
  if (cache->spec.rank.group.empty()) return {cache};
  std::vector<std::shared_ptr<const Cache>> ranks;
  const MutexLock lock(&mutex_);
  for (const auto& [id, other] : caches_) {
    const bool member = other->tenant == cache->tenant && other->spec.name == cache->spec.name &&
                        other->spec.rank.group == cache->spec.rank.group;
    if (member) ranks.push_back(other);
  }
  return ranks;
}

uint32_t StoreImpl::MatchRanks(const std::shared_ptr<const Cache>& cache,
                               std::span<const uint32_t> token_ids,
                               std::string_view extra_key) const {
  const std::vector<std::shared_ptr<const Cache>> ranks = CachesOfGroup(cache);
  if (ranks.size() < cache->spec.rank.rank_count) return 0;  // a missing rank holds nothing
  size_t steps = ~size_t{0};
  for (const auto& rank : ranks) {
    const PrefixKey root = PrefixRoot(rank->tenant, rank->spec, extra_key);
    steps = std::min(steps, rank->prefixes->Match(root, token_ids).size());
  }
  return static_cast<uint32_t>(steps * kPrefixStepTokens);
}

RankPrefixes StoreImpl::ShareRankPrefixes(const std::shared_ptr<const Cache>& cache,
                                          std::span<const uint32_t> token_ids,
                                          std::string_view extra_key) const {
  const std::vector<std::shared_ptr<const Cache>> ranks = CachesOfGroup(cache);
  if (ranks.size() < cache->spec.rank.rank_count) return {};
  std::vector<std::vector<PrefixKey>> keys;
  size_t steps = ~size_t{0};
  for (const auto& rank : ranks) {
    const PrefixKey root = PrefixRoot(rank->tenant, rank->spec, extra_key);
    keys.push_back(rank->prefixes->Match(root, token_ids));
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

StoreImpl::Prefix StoreImpl::SharePrefix(const std::shared_ptr<const Cache>& cache,
                                         std::span<const uint32_t> token_ids,
                                         std::string_view extra_key) const {
  Prefix prefix{.root = PrefixRoot(cache->tenant, cache->spec, extra_key), .snapshot = nullptr};
  if (token_ids.size() < kPrefixStepTokens) return prefix;
  const uint32_t token_count =
      cache->spec.rank.group.empty() ? ~0u : MatchRanks(cache, token_ids, extra_key);
  std::vector<PrefixKey> keys = cache->prefixes->Match(prefix.root, token_ids);
  keys.resize(std::min<size_t>(keys.size(), token_count / kPrefixStepTokens));
  // Holders may be dropped or truncated concurrently; the prefix is then shorter.
  for (; !keys.empty() && prefix.snapshot == nullptr; keys.pop_back()) {
    prefix.snapshot = ShareSteps(*cache, keys);
  }
  return prefix;
}

void StoreImpl::CountPrefix(const Cache& cache, const SequenceSpec& spec, const Snapshot* found) {
  prompt_tokens_ += spec.token_ids.size() / kPrefixStepTokens * kPrefixStepTokens;
  if (found == nullptr) return;
  matched_tokens_ += found->token_count();
  const uint64_t tick = cache.uses->Tick();
  for (const SegmentEntry& entry : found->list->segments) {
    cache.uses->Use(tick, /*hit=*/true, entry.rows->heat());
  }
}

absl::StatusOr<CreatedSequence> StoreImpl::StartLiveIndex(
    absl::StatusOr<CreatedSequence> created, const std::optional<LiveIndex>& live_index) {
  if (!created.ok() || !live_index.has_value()) return created;
  const auto found = FindInAnyTenant(created->sequence_id);
  if (!found.ok()) return found.status();
  absl::Status status = engine_->live->Add(found->cache, found->sequence, *live_index);
  if (!status.ok()) {
    RemoveFromMap(created->sequence_id);
    found->sequence->Drop();  // not yet a member of its group
    return status;
  }
  return created;
}

absl::StatusOr<CreatedSequence> StoreImpl::CreateSequence(std::string_view tenant,
                                                          uint64_t cache_id,
                                                          const SequenceSpec& spec) {
  auto cache = FindCache(tenant, cache_id);
  if (!cache.ok()) return cache.status();
  if (spec.live_index.has_value()) {
    if (absl::Status status = CheckLiveIndex(**cache, *spec.live_index); !status.ok()) {
      return status;
    }
  }
  if (absl::Status status = CheckPrefix(spec.token_ids, spec.extra_key); !status.ok()) {
    return status;
  }
  if (absl::Status status = CheckGroupKey(**cache, spec.group_key); !status.ok()) return status;
  if (!spec.group_key.empty()) return CreateGroupMember(*cache, spec);
  Prefix prefix = SharePrefix(*cache, spec.token_ids, spec.extra_key);
  CountPrefix(**cache, spec, prefix.snapshot.get());
  return StartLiveIndex(AddSequence(*std::move(cache), {.session = spec.session,
                                                        .first = std::move(prefix.snapshot),
                                                        .root = prefix.root,
                                                        .token_ids = spec.token_ids,
                                                        .live_index = spec.live_index}),
                        spec.live_index);
}

absl::StatusOr<CreatedSequence> StoreImpl::CreateGroupMember(
    const std::shared_ptr<const Cache>& cache, const SequenceSpec& spec) {
  auto seat = rank_sequences_.AcquireSeat(
      *cache, spec.group_key, PromptDigest(spec.token_ids, spec.extra_key),
      [&] { return ShareRankPrefixes(cache, spec.token_ids, spec.extra_key); });
  if (!seat.ok()) return seat.status();
  CountPrefix(*cache, spec, seat->first().get());
  auto created = StartLiveIndex(
      AddSequence(cache, {.session = spec.session,
                          .first = seat->first(),
                          .root = PrefixRoot(cache->tenant, cache->spec, spec.extra_key),
                          .token_ids = spec.token_ids,
                          .live_index = spec.live_index,
                          .group_key = spec.group_key}),
      spec.live_index);
  if (!created.ok()) return created;
  // If it is not found, its session ended concurrently, and the sequence never becomes a member.
  if (const auto found = FindInAnyTenant(created->sequence_id); found.ok()) {
    seat->Join(found->sequence);
  }
  return created;
}

absl::StatusOr<CreatedSequence> StoreImpl::ForkSequence(std::string_view tenant,
                                                        uint64_t sequence_id, uint64_t token_count,
                                                        std::string_view session) {
  auto found = Find(tenant, sequence_id);
  if (!found.ok()) return found.status();
  const auto parent = found->sequence->Read();
  if (!parent.ok()) return parent.status();
  const uint32_t stored = (*parent)->token_count();
  if (token_count > stored) {
    return OutOfRange("token_count",
                      absl::StrCat(token_count, "; the sequence has ", stored, " tokens"));
  }
  const uint32_t shared = token_count == 0 ? stored : static_cast<uint32_t>(token_count);
  // Includes indexes that are not ready only for an incremental index: no build would complete
  // other ones.
  const std::optional<LiveIndex> live_index = engine_->live->SpecOf(sequence_id);
  auto first = found->names->Share(shared, /*partial_indexes=*/live_index.has_value());
  if (!first.ok()) return first.status();
  return StartLiveIndex(AddSequence(std::move(found->cache), {.session = std::string(session),
                                                              .first = std::move(first->snapshot),
                                                              .root = found->names->root(),
                                                              .token_ids = first->token_ids,
                                                              .live_index = live_index}),
                        live_index);
}

absl::StatusOr<uint64_t> StoreImpl::MatchPrefix(std::string_view tenant, uint64_t cache_id,
                                                std::span<const uint32_t> token_ids,
                                                std::string_view extra_key) {
  const auto cache = FindCache(tenant, cache_id);
  if (!cache.ok()) return cache.status();
  if (absl::Status status = CheckPrefix(token_ids, extra_key); !status.ok()) return status;
  return MatchRanks(*cache, token_ids, extra_key);
}

absl::Status StoreImpl::NameTokens(std::string_view tenant, uint64_t sequence_id,
                                   uint64_t first_position, std::span<const uint32_t> token_ids) {
  const auto found = Find(tenant, sequence_id);
  if (!found.ok()) return found.status();
  if (const auto running = found->sequence->Read(); !running.ok()) return running.status();
  return found->names->Name(first_position, token_ids);
}

absl::Status StoreImpl::CheckNames(std::string_view tenant, uint64_t sequence_id,
                                   uint64_t first_position,
                                   std::span<const uint32_t> token_ids) const {
  const auto found = Find(tenant, sequence_id);
  if (!found.ok()) return found.status();
  if (const auto running = found->sequence->Read(); !running.ok()) return running.status();
  return found->names->Check(first_position, token_ids);
}

absl::StatusOr<uint64_t> StoreImpl::SuspendSequence(std::string_view tenant, uint64_t sequence_id) {
  const auto found = Find(tenant, sequence_id);
  if (!found.ok()) return found.status();
  return found->sequence->Suspend(true);
}

absl::StatusOr<uint64_t> StoreImpl::ResumeSequence(std::string_view tenant, uint64_t sequence_id) {
  const auto found = Find(tenant, sequence_id);
  if (!found.ok()) return found.status();
  return found->sequence->Suspend(false);
}

void StoreImpl::RemoveFromMap(uint64_t sequence_id) {
  const MutexLock lock(&mutex_);
  const auto it = sequences_.find(sequence_id);
  if (it == sequences_.end()) return;
  --sequence_counts_[it->second.cache->cache_id];
  sequences_.erase(it);
}

absl::Status StoreImpl::DropSequence(std::string_view tenant, uint64_t sequence_id) {
  const auto found = Find(tenant, sequence_id);
  if (!found.ok()) return found.status();
  EndSequence(*found);
  return absl::OkStatus();
}

uint32_t StoreImpl::DropSession(std::string_view session) {
  local_.Drop(session);  // first, so that the session's client discards results
  if (session.empty()) return 0;
  std::vector<Found> dropped;
  {
    const MutexLock lock(&mutex_);
    for (const auto& [id, found] : sequences_) {
      if (found.sequence->session() == session) dropped.push_back(found);
    }
  }
  for (const Found& found : dropped) EndSequence(found);
  if (root_ != nullptr) root_->ForgetSession(session);
  return static_cast<uint32_t>(dropped.size());
}

absl::StatusOr<uint64_t> StoreImpl::TruncateSequence(std::string_view tenant, uint64_t sequence_id,
                                                     uint64_t token_count, uint64_t own_lease) {
  const auto found = Find(tenant, sequence_id);
  if (!found.ok()) return found.status();
  auto lease = WriteLease::Acquire(found->sequence);
  if (!lease.ok()) return lease.status();
  return TruncateRows(*std::move(lease), token_count, own_lease);
}

absl::StatusOr<std::unique_ptr<IngestTransaction>> StoreImpl::BeginIngest(std::string_view tenant,
                                                                          uint64_t sequence_id) {
  const auto found = Find(tenant, sequence_id);
  if (!found.ok()) return found.status();
  auto lease = WriteLease::Acquire(found->sequence);
  if (!lease.ok()) return lease.status();
  return kvstore::BeginIngest(found->cache, *std::move(lease));
}

absl::StatusOr<uint64_t> StoreImpl::Append(std::string_view tenant, uint64_t sequence_id,
                                           uint64_t first_position,
                                           std::span<const LayerRows> layers) {
  const auto found = Find(tenant, sequence_id);
  if (!found.ok()) return found.status();
  auto lease = WriteLease::Acquire(found->sequence);
  if (!lease.ok()) return lease.status();
  return AppendRows(found->cache, *std::move(lease), first_position, layers);
}

absl::Status StoreImpl::BuildIndex(std::string_view tenant, uint64_t sequence_id,
                                   const BuildSpec& spec,
                                   const std::function<bool(const BuildProgress&)>& progress) {
  const auto found = Find(tenant, sequence_id);
  if (!found.ok()) return found.status();
  const Hold hold(*found->sequence);  // held longer than the write lease
  auto lease = WriteLease::Acquire(found->sequence);
  if (!lease.ok()) return lease.status();
  return BuildSequenceIndex(*found->cache, *std::move(lease), spec, progress);
}

}  // namespace pqcached::kvstore

#include "kvstore/store/lifecycle.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/base/status_macros.h"
#include "kvstore/index/merge.h"
#include "kvstore/refusal.h"
#include "kvstore/sequence/sequence_record.h"

namespace pqcached::kvstore {
namespace {

// Returns whether `other`, whose indexes are all ready, has the ready indexes of `snapshot`.
bool HasIndexesOf(const Snapshot& snapshot, const Snapshot& other) {
  const SegmentList& list = *snapshot.list;
  for (size_t i = 0; i < list.indexes.size(); ++i) {
    if (list.index_ready(i) && other.list->Find(list.indexes[i]) == other.list->indexes.size()) {
      return false;
    }
  }
  return true;
}

}  // namespace

absl::StatusOr<StoredSequence> Lifecycle::Make(std::shared_ptr<const Cache> cache,
                                               uint64_t sequence_id, NewSequence made) {
  std::shared_ptr<const Snapshot> first = std::move(made.first);
  if (first == nullptr) {
    first = std::make_shared<const Snapshot>(std::make_shared<SegmentList>(),
                                             std::vector<uint32_t>(cache->layers.size(), 0));
  }
  const uint32_t token_count = first->token_count();
  std::unique_ptr<SequenceRecord> record;
  std::unique_ptr<NamesRecord> names_record;
  if (cache->records != nullptr) {
    ASSIGN_OR_RETURN(auto created, SequenceRecord::Create(cache->records,
                                                          {.sequence_id = sequence_id,
                                                           .session = made.session,
                                                           .root = made.root,
                                                           .live_index = made.live_index,
                                                           .group_key = made.group_key,
                                                           .retention = made.retention},
                                                          *first));
    record = std::move(created);
    names_record = std::make_unique<NamesRecord>(cache->records, record->slot());
  }
  auto sequence = std::make_shared<Sequence>(sequence_id, std::move(made.session),
                                             Sequence::Start{.first = std::move(first),
                                                             .record = std::move(record),
                                                             .views = {},
                                                             .group_key = made.group_key,
                                                             .retention = made.retention});
  auto names = std::make_shared<NamedTokens>(cache->prefixes, made.root, sequence, token_count,
                                             std::move(names_record));
  absl::Status status = sequence->Watch(names).status();
  if (status.ok()) status = names->Name(0, made.names);
  if (!status.ok()) {
    sequence->Drop();
    return status;
  }
  if (cache->records != nullptr) parts_.checksums->Add(cache, sequence);
  return StoredSequence{std::move(cache), std::move(sequence), std::move(names)};
}

absl::StatusOr<CreatedSequence> Lifecycle::Add(std::shared_ptr<const Cache> cache,
                                               NewSequence made) {
  const uint64_t cache_id = cache->cache_id;
  parts_.evictor.MakeRoomForOne(*cache);
  absl::Status status = parts_.sequences.Reserve(cache_id, parts_.options.max_sequences);
  if (!status.ok()) return status;
  const uint64_t sequence_id = parts_.memory.NewId();
  const uint32_t token_count = made.first == nullptr ? 0 : made.first->token_count();
  auto stored = Make(std::move(cache), sequence_id, std::move(made));
  if (!stored.ok()) {
    parts_.sequences.Cancel(cache_id);
    return stored.status();
  }
  parts_.sequences.Add(*std::move(stored));
  return CreatedSequence{.sequence_id = sequence_id, .token_count = token_count};
}

absl::StatusOr<CreatedSequence> Lifecycle::StartLiveIndex(
    absl::StatusOr<CreatedSequence> created, const std::optional<LiveIndex>& live_index) {
  if (!created.ok() || !live_index.has_value()) return created;
  ASSIGN_OR_RETURN(const auto found, parts_.sequences.FindInAnyTenant(created->sequence_id));
  absl::Status status = parts_.live.Add(found.cache, found.sequence, *live_index);
  if (!status.ok()) {
    parts_.sequences.Remove(created->sequence_id);
    found.sequence->Drop();  // not yet a member of its group
    return status;
  }
  return created;
}

absl::StatusOr<CreatedSequence> Lifecycle::Create(const std::shared_ptr<const Cache>& cache,
                                                  const SequenceSpec& spec) {
  if (spec.live_index.has_value()) {
    RETURN_IF_ERROR(CheckLiveIndex(*cache, *spec.live_index));
  }
  RETURN_IF_ERROR(CheckPrefix(spec.names(), spec.extra_key));
  RETURN_IF_ERROR(CheckGroupKey(*cache, spec.group_key));
  if (!spec.group_key.empty()) return CreateGroupMember(cache, spec);
  PrefixSharing::Prefix prefix = parts_.prefixes.Share(cache, NameView(spec), spec.extra_key);
  parts_.prefixes.Count(*cache, spec, prefix.snapshot.get());
  return StartLiveIndex(Add(cache, {.session = spec.session,
                                    .first = std::move(prefix.snapshot),
                                    .root = prefix.root,
                                    .names = NameView(spec),
                                    .live_index = spec.live_index,
                                    .retention = spec.retention}),
                        spec.live_index);
}

absl::StatusOr<CreatedSequence> Lifecycle::CreateGroupMember(
    const std::shared_ptr<const Cache>& cache, const SequenceSpec& spec) {
  ASSIGN_OR_RETURN(
      auto seat,
      parts_.ranks.AcquireSeat(
          *cache, spec.group_key, PromptDigest(NameView(spec), spec.extra_key),
          [&] { return parts_.prefixes.ShareInAllRanks(cache, NameView(spec), spec.extra_key); }));
  parts_.prefixes.Count(*cache, spec, seat.first().get());
  auto created =
      StartLiveIndex(Add(cache, {.session = spec.session,
                                 .first = seat.first(),
                                 .root = PrefixRoot(cache->tenant, cache->spec, spec.extra_key),
                                 .names = NameView(spec),
                                 .live_index = spec.live_index,
                                 .group_key = spec.group_key,
                                 .retention = spec.retention}),
                     spec.live_index);
  if (!created.ok()) return created;
  // If it is not found, its session ended concurrently, and the sequence never becomes a member.
  if (const auto found = parts_.sequences.FindInAnyTenant(created->sequence_id); found.ok()) {
    seat.Join(found->sequence);
  }
  return created;
}

absl::StatusOr<CreatedSequence> Lifecycle::Fork(const StoredSequence& parent, uint64_t token_count,
                                                std::string_view session) {
  ASSIGN_OR_RETURN(const auto snapshot, parent.sequence->Read());
  const uint32_t stored = snapshot->token_count();
  if (token_count > stored) {
    return OutOfRange("token_count",
                      absl::StrCat(token_count, "; the sequence has ", stored, " tokens"));
  }
  const uint32_t shared = token_count == 0 ? stored : static_cast<uint32_t>(token_count);
  // Includes indexes that are not ready only for an incremental index: no build would complete
  // other ones.
  const std::optional<LiveIndex> live_index = parts_.live.SpecOf(parent.sequence->sequence_id());
  ASSIGN_OR_RETURN(auto first,
                   parent.names->Share(shared, /*partial_indexes=*/live_index.has_value()));
  return StartLiveIndex(Add(parent.cache, {.session = std::string(session),
                                           .first = std::move(first.snapshot),
                                           .root = parent.names->root(),
                                           .names = first.names,
                                           .live_index = live_index,
                                           .retention = parent.sequence->retention()}),
                        live_index);
}

absl::StatusOr<CreatedSequence> Lifecycle::AddPrefix(const std::shared_ptr<const Cache>& cache,
                                                     std::shared_ptr<const Snapshot> snapshot,
                                                     const PrefixKey& root, const NameView& names) {
  const uint64_t tick = cache->uses->Tick();
  for (const SegmentEntry& entry : snapshot->list->segments) {
    cache->uses->Use(tick, /*hit=*/false, entry.rows->heat());
  }
  return Add(cache, {.session = {}, .first = std::move(snapshot), .root = root, .names = names});
}

void Lifecycle::Drop(const StoredSequence& stored) {
  parts_.sequences.Remove(stored.sequence->sequence_id());
  stored.sequence->Drop();  // a writer in progress fails when it publishes
  parts_.ranks.Ended(*stored.cache, *stored.sequence);
}

void Lifecycle::End(const StoredSequence& stored) {
  const Retention retention = stored.sequence->retention();
  const bool retain =
      retention == Retention::kByOption ? parts_.options.retain : retention == Retention::kAlways;
  if (retain && !stored.retained()) return Retain(stored);
  Drop(stored);
}

absl::StatusOr<NamedTokens::Shared> Lifecycle::ShareRetainable(const StoredSequence& stored,
                                                               std::span<const PrefixKey> keys) {
  if (keys.empty()) return NotFound("", "nothing to retain");
  ASSIGN_OR_RETURN(const auto newest, stored.sequence->Peek());
  ASSIGN_OR_RETURN(auto shared,
                   stored.names->Share(static_cast<uint32_t>(keys.size() * kPrefixStepTokens),
                                       /*partial_indexes=*/false));
  if (!shared.snapshot->list->samples.empty()) {  // its index needs them no longer
    SegmentList list = *shared.snapshot->list;
    list.samples.clear();
    shared.snapshot = CompleteSnapshot(std::move(list), shared.snapshot->layer_tokens);
  }
  const SegmentEntry& last = shared.snapshot->list->segments.back();
  const uint32_t used_slots = last.token_end - last.rows->first_position();
  if (last.rows.get() != newest->list->tail() || 4 * used_slots > 3 * last.rows->slot_capacity() ||
      IsHeldElsewhere(stored, keys, *shared.snapshot)) {
    return shared;
  }
  auto copy = CopySegment(*stored.cache, last);
  if (!copy.ok()) return shared;  // the unused slots are retained, too
  SegmentList list = *shared.snapshot->list;
  list.segments.back() = *std::move(copy);
  shared.snapshot = CompleteSnapshot(std::move(list), shared.snapshot->layer_tokens);
  return shared;
}

bool Lifecycle::IsHeldElsewhere(const StoredSequence& stored, std::span<const PrefixKey> keys,
                                const Snapshot& kept) {
  for (const auto& holder : stored.cache->prefixes->Holders(keys.back())) {
    if (holder == stored.names) continue;
    if (kept.list->indexes.empty()) return true;
    const auto theirs = holder->ShareStep(keys.size() - 1, keys.back());
    if (theirs != nullptr && HasIndexesOf(kept, *theirs)) return true;
  }
  return false;
}

void Lifecycle::DropRedundant(const StoredSequence& retained, std::span<const PrefixKey> keys) {
  const auto kept = retained.sequence->Peek();
  if (!kept.ok()) return;
  for (const StoredSequence& other : parts_.sequences.RetainedOfCache(retained.cache->cache_id)) {
    if (other.sequence == retained.sequence) continue;
    const std::vector<PrefixKey> theirs = other.names->ListedKeys();
    if (theirs.size() > keys.size() || !std::equal(theirs.begin(), theirs.end(), keys.begin())) {
      continue;
    }
    const auto held = other.sequence->Peek();
    const uint64_t named_tokens = theirs.size() * kPrefixStepTokens;
    if (held.ok() && (*held)->token_count() > named_tokens) continue;  // no key names all of them
    if (theirs.size() == keys.size() && held.ok() && !HasIndexesOf(**held, **kept)) continue;
    if (!other.sequence->holds().Claim()) continue;
    parts_.sequences.Remove(other.sequence->sequence_id());
    other.sequence->Drop();
  }
}

// Retains the tokens in a new sequence without a session. It has a new id, so that calls with the
// old id fail, as after any drop.
void Lifecycle::Retain(const StoredSequence& stored) {
  const Cache& cache = *stored.cache;
  const std::vector<PrefixKey> keys = stored.names->ListedKeys();
  auto kept = ShareRetainable(stored, keys);  // may copy rows, so no lock is held
  const MutexLock lock(&retain_mutex_);
  if (kept.ok() && IsHeldElsewhere(stored, keys, *kept->snapshot)) {
    kept = NotFound("", "held already");
  }
  const int64_t pinned_until = stored.sequence->holds().pinned_until();
  const PrefixKey root = stored.names->root();
  Drop(stored);
  if (!kept.ok()) return;
  const uint64_t tick = cache.uses->Tick();
  for (const SegmentEntry& entry : kept->snapshot->list->segments) {
    cache.uses->Use(tick, /*hit=*/false, entry.rows->heat());
  }
  const auto made =
      Add(stored.cache,
          {.session = {}, .first = std::move(kept->snapshot), .root = root, .names = kept->names});
  if (!made.ok()) return;  // max_sequences reached, and all sequences are in use
  const auto retained = parts_.sequences.FindInAnyTenant(made->sequence_id);
  if (!retained.ok()) return;
  if (pinned_until > BootNanos()) {
    retained->sequence->PinUntil(pinned_until).IgnoreError();  // if this fails, it may be evicted
  }
  DropRedundant(*retained, keys);
  const PoolUsage usage = cache.pool->usage();
  // A cache that grows has little more than it uses: its share is one of all that it may have.
  const size_t granted_bytes = cache.pool->granted_bytes();
  const size_t pool_bytes =
      granted_bytes + std::min(usage.capacity_bytes - std::min(usage.capacity_bytes, granted_bytes),
                               parts_.caches.GrowableBytes(stored.cache));
  const auto most_bytes =
      static_cast<size_t>(static_cast<double>(pool_bytes) * parts_.options.max_retained_share);
  if (usage.used_bytes > most_bytes) parts_.evictor.ShrinkRetained(cache, most_bytes);
}

}  // namespace pqcached::kvstore

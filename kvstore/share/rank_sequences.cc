#include "kvstore/share/rank_sequences.h"

#include <algorithm>
#include <optional>

#include "absl/strings/str_cat.h"
#include "kernels/base/status_macros.h"
#include "kvstore/refusal.h"

namespace pqcached::kvstore {
namespace {

bool IsAlive(const Sequence* sequence) {
  return sequence != nullptr && !sequence->dropped() && !sequence->holds().claimed();
}

absl::Status HeldError(const Sequence& sequence) {
  return FailedPrecondition(
      "sequence_id", absl::StrCat("sequence ", sequence.sequence_id(),
                                  sequence.holds().pinned() ? ": it is pinned"
                                                            : ": a writer or a build holds it"));
}

}  // namespace

absl::Status CheckGroupKey(const Cache& cache, std::string_view group_key) {
  if (group_key.size() > kMaxGroupKeyBytes) {
    return InvalidArgument(
        "group_key", absl::StrCat(group_key.size(), " bytes, must be at most ", kMaxGroupKeyBytes));
  }
  if (!group_key.empty() && cache.spec.rank.group.empty()) {
    return InvalidArgument("group_key", "the cache has no rank.group");
  }
  return absl::OkStatus();
}

bool RankSequences::Entry::HasLiveMember() const {
  return !ranks_joining.empty() ||
         std::any_of(members.begin(), members.end(),
                     [](const Member& member) { return IsAlive(member.sequence.lock().get()); });
}

RankSequences::Name RankSequences::NameOf(const Cache& cache, const std::string& group_key) {
  return {.tenant = cache.tenant,
          .cache = cache.spec.name,
          .group = cache.spec.rank.group,
          .key = group_key};
}

absl::Status RankSequences::CheckFree(const Entry& entry, uint32_t rank, const PrefixKey& prompt) {
  if (entry.ranks_joining.contains(rank)) {
    return AlreadyExists("group_key", "another call makes the sequence of this rank");
  }
  for (const Member& member : entry.members) {
    if (member.rank != rank) continue;
    const bool alive = IsAlive(member.sequence.lock().get());
    return AlreadyExists(
        "group_key",
        absl::StrCat("this rank ", alive ? "has" : "had", " sequence ", member.sequence_id,
                     " under it", alive ? "" : ", and other ranks still have theirs"));
  }
  if (entry.recovered) {
    return FailedPrecondition("group_key",
                              "the sidecar has restarted since the other ranks' calls: end their "
                              "sequences, and use another key on all ranks");
  }
  if (entry.prompt != prompt) {
    return FailedPrecondition(
        "group_key", "token_ids, content_keys or extra_key are not those of the first rank");
  }
  return absl::OkStatus();
}

absl::StatusOr<RankSequences::Seat> RankSequences::AcquireSeat(
    const Cache& cache, const std::string& group_key, const PrefixKey& prompt,
    const std::function<RankPrefixes()>& settle) {
  const Name name = NameOf(cache, group_key);
  const uint32_t rank = cache.spec.rank.rank;
  auto seat = TakeSeat(name, rank, prompt, nullptr);
  if (!absl::IsNotFound(seat.status())) return seat;
  RankPrefixes settled = settle();
  return TakeSeat(name, rank, prompt, &settled);  // if another rank was first, its prefix counts
}

absl::StatusOr<RankSequences::Seat> RankSequences::TakeSeat(const Name& name, uint32_t rank,
                                                            const PrefixKey& prompt,
                                                            RankPrefixes* settled) {
  Entry unused;
  const MutexLock lock(&mutex_);
  if (const auto old = entries_.find(name); old != entries_.end()) unused = ExtractIfUnused(old);
  auto entry = entries_.find(name);
  if (entry == entries_.end()) {
    if (settled == nullptr) return NotFound("group_key", "not in use");
    entry = entries_.try_emplace(name).first;
    entry->second.prompt = prompt;
    entry->second.held.swap(*settled);
  }
  RETURN_IF_ERROR(CheckFree(entry->second, rank, prompt));
  entry->second.ranks_joining.insert(rank);
  const auto held = entry->second.held.find(rank);
  return Seat(this, name, rank, held == entry->second.held.end() ? nullptr : held->second);
}

void RankSequences::LeaveSeat(const Name& name, uint32_t rank,
                              const std::shared_ptr<Sequence>& member) {
  RankPrefixes::node_type begun;  // destroyed after the lock is released
  Entry unused;
  const MutexLock lock(&mutex_);
  const auto entry = entries_.find(name);  // exists while the seat is taken
  entry->second.ranks_joining.erase(rank);
  if (member != nullptr) {
    entry->second.members.push_back({rank, member->sequence_id(), member});
    begun = entry->second.held.extract(rank);
  }
  unused = ExtractIfUnused(entry);
}

RankSequences::Entry RankSequences::ExtractIfUnused(Entries::iterator entry) {
  if (entry->second.HasLiveMember()) return {};
  return std::move(entries_.extract(entry).mapped());
}

void RankSequences::Restore(const Cache& cache, const std::shared_ptr<Sequence>& sequence) {
  const MutexLock lock(&mutex_);
  Entry& entry = entries_[NameOf(cache, sequence->group_key())];
  entry.recovered = true;
  entry.members.push_back({cache.spec.rank.rank, sequence->sequence_id(), sequence});
}

void RankSequences::Ended(const Cache& cache, const Sequence& sequence) {
  if (sequence.group_key().empty()) return;
  Entry unused;
  const MutexLock lock(&mutex_);
  const auto entry = entries_.find(NameOf(cache, sequence.group_key()));
  if (entry != entries_.end()) unused = ExtractIfUnused(entry);
}

RankSequences::Members RankSequences::FindMembers(const Name& name,
                                                  const std::shared_ptr<Sequence>& sequence) const {
  Members members{.alive = {sequence}};
  const auto entry = entries_.find(name);
  if (entry == entries_.end()) return members;
  members.joining = !entry->second.ranks_joining.empty();
  const std::vector<Member>& known = entry->second.members;
  const bool is_member = std::any_of(known.begin(), known.end(), [&](const Member& member) {
    return member.sequence_id == sequence->sequence_id();
  });
  if (!is_member || sequence->dropped()) return members;  // the key now belongs to another sequence
  for (const Member& member : known) {
    auto other = member.sequence.lock();
    if (IsAlive(other.get()) && other != sequence) members.alive.push_back(std::move(other));
  }
  return members;
}

RankSequences::Members RankSequences::MembersOf(const Cache& cache,
                                                const std::shared_ptr<Sequence>& sequence) const {
  if (sequence->group_key().empty()) return {.alive = {sequence}};
  const MutexLock lock(&mutex_);
  return FindMembers(NameOf(cache, sequence->group_key()), sequence);
}

absl::StatusOr<std::vector<std::shared_ptr<Sequence>>> RankSequences::Claim(
    const Cache& cache, const std::shared_ptr<Sequence>& sequence) {
  if (sequence->group_key().empty()) {
    if (!sequence->holds().Claim()) return HeldError(*sequence);
    return std::vector{sequence};
  }
  Entry unused;
  const Name name = NameOf(cache, sequence->group_key());
  const MutexLock lock(&mutex_);
  Members members = FindMembers(name, sequence);
  if (members.joining) {
    return FailedPrecondition("sequence_id",
                              absl::StrCat("sequence ", sequence->sequence_id(),
                                           ": another rank is joining its group_key"));
  }
  std::vector<std::shared_ptr<Sequence>>& all = members.alive;
  const auto held = std::find_if_not(all.begin(), all.end(),
                                     [](const auto& member) { return member->holds().Reserve(); });
  const bool claimed = held == all.end();
  std::for_each(all.begin(), held, [&](const auto& member) { member->holds().Decide(claimed); });
  if (!claimed) return HeldError(**held);
  if (const auto entry = entries_.find(name); entry != entries_.end())
    unused = ExtractIfUnused(entry);
  return std::move(all);
}

}  // namespace pqcached::kvstore

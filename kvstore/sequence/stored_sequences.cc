#include "kvstore/sequence/stored_sequences.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/base/status_macros.h"
#include "kvstore/refusal.h"

namespace pqcached::kvstore {

absl::Status StoredSequences::Reserve(uint64_t cache_id, uint32_t max_count) {
  const MutexLock lock(&mutex_);
  if (closed_.contains(cache_id)) {
    return NotFound("cache_id", absl::StrCat("no cache ", cache_id));
  }
  uint32_t& count = counts_[cache_id];
  if (count >= max_count) {
    return ResourceExhausted("max_sequences",
                             absl::StrCat("cache ", cache_id, " has ", count, " sequences"),
                             kRetryMemory);
  }
  ++count;
  return absl::OkStatus();
}

absl::Status StoredSequences::CheckNotHeld(uint64_t cache_id) const {
  const auto held = [&](const std::string& holder) {
    return FailedPrecondition("cache_id", absl::StrCat("cache ", cache_id, ": ", holder));
  };
  uint32_t found = 0;
  for (const auto& [id, stored] : sequences_) {
    if (stored.cache->cache_id != cache_id) continue;
    ++found;
    if (!stored.retained()) {
      return held(absl::StrCat("session ", stored.sequence->session(), " has sequence ", id));
    }
    if (stored.sequence->holds().pinned()) {
      return held(absl::StrCat("the cached prefix ", id, " is pinned"));
    }
  }
  const auto count = counts_.find(cache_id);
  if (count != counts_.end() && count->second > found) return held("a sequence is being created");
  return absl::OkStatus();
}

std::set<uint64_t> StoredSequences::HeldCaches() const {
  std::set<uint64_t> held;
  const MutexLock lock(&mutex_);
  std::unordered_map<uint64_t, uint32_t> creating = counts_;
  for (const auto& [id, stored] : sequences_) {
    const uint64_t cache_id = stored.cache->cache_id;
    --creating[cache_id];
    if (!stored.retained() || stored.sequence->holds().pinned()) held.insert(cache_id);
  }
  for (const auto& [cache_id, count] : creating) {
    if (count > 0) held.insert(cache_id);
  }
  return held;
}

absl::Status StoredSequences::CloseCache(uint64_t cache_id, bool force) {
  const MutexLock lock(&mutex_);
  if (!force) RETURN_IF_ERROR(CheckNotHeld(cache_id));
  closed_.insert(cache_id);
  return absl::OkStatus();
}

void StoredSequences::Cancel(uint64_t cache_id) {
  const MutexLock lock(&mutex_);
  --counts_[cache_id];
}

void StoredSequences::Add(StoredSequence stored) {
  const uint64_t sequence_id = stored.sequence->sequence_id();
  const MutexLock lock(&mutex_);
  sequences_.emplace(sequence_id, std::move(stored));
}

void StoredSequences::Restore(StoredSequence stored) {
  const uint64_t sequence_id = stored.sequence->sequence_id();
  const MutexLock lock(&mutex_);
  ++counts_[stored.cache->cache_id];
  sequences_.emplace(sequence_id, std::move(stored));
}

void StoredSequences::Remove(uint64_t sequence_id) {
  const MutexLock lock(&mutex_);
  const auto it = sequences_.find(sequence_id);
  if (it != sequences_.end()) Erase(it);
}

void StoredSequences::Erase(std::unordered_map<uint64_t, StoredSequence>::iterator it) {
  --counts_[it->second.cache->cache_id];
  sequences_.erase(it);
}

void StoredSequences::RemoveEvicted(uint64_t sequence_id) {
  const MutexLock lock(&mutex_);
  const auto it = sequences_.find(sequence_id);
  if (it == sequences_.end()) return;
  evicted_.Add(sequence_id, it->second.cache->tenant);
  Erase(it);
}

absl::StatusOr<StoredSequence> StoredSequences::FindInAnyTenant(uint64_t sequence_id) const {
  return Look(kAllTenants, sequence_id);
}

absl::StatusOr<StoredSequence> StoredSequences::Find(std::string_view tenant,
                                                     uint64_t sequence_id) const {
  if (tenant == kAllTenants) return NotFound("sequence_id", "it needs the tenant");
  auto found = Look(tenant, sequence_id);
  if (found.ok()) found->sequence->holds().Touch();
  return found;
}

// A tenant receives the same answer for a sequence of another tenant, whether it exists, was
// evicted, or never existed.
absl::StatusOr<StoredSequence> StoredSequences::Look(std::string_view tenant,
                                                     uint64_t sequence_id) const {
  {
    const MutexLock lock(&mutex_);
    const auto it = sequences_.find(sequence_id);
    const bool found =
        it != sequences_.end() && (tenant == kAllTenants || it->second.cache->tenant == tenant);
    if (found) return it->second;
  }
  return NotFound("sequence_id",
                  evicted_.Contains(sequence_id, tenant)
                      ? absl::StrCat("sequence ", sequence_id, " was evicted: memory was short")
                      : absl::StrCat("no sequence ", sequence_id));
}

template <class Predicate>
std::vector<StoredSequence> StoredSequences::Filter(const Predicate& predicate) const {
  std::vector<StoredSequence> found;
  const MutexLock lock(&mutex_);
  for (const auto& [id, stored] : sequences_) {
    if (predicate(stored)) found.push_back(stored);
  }
  return found;
}

std::vector<StoredSequence> StoredSequences::All() const {
  return Filter([](const StoredSequence&) { return true; });
}

std::vector<StoredSequence> StoredSequences::OfCache(uint64_t cache_id) const {
  return Filter([&](const StoredSequence& one) { return one.cache->cache_id == cache_id; });
}

std::vector<StoredSequence> StoredSequences::RetainedOfCache(uint64_t cache_id) const {
  return Filter(
      [&](const StoredSequence& one) { return one.cache->cache_id == cache_id && one.retained(); });
}

std::vector<StoredSequence> StoredSequences::OfSession(std::string_view session) const {
  return Filter([&](const StoredSequence& one) { return one.sequence->session() == session; });
}

std::vector<StoredSequence> StoredSequences::OfOtherRanks(const Cache& cache) const {
  const std::string& group = cache.spec.rank.group;
  if (group.empty()) return {};
  return Filter([&](const StoredSequence& one) {
    const Cache& other = *one.cache;
    return other.cache_id != cache.cache_id && other.tenant == cache.tenant &&
           other.spec.name == cache.spec.name && other.spec.rank.group == group;
  });
}

uint32_t StoredSequences::CountOfCache(uint64_t cache_id) const {
  const MutexLock lock(&mutex_);
  const auto it = counts_.find(cache_id);
  return it == counts_.end() ? 0 : it->second;
}

}  // namespace pqcached::kvstore

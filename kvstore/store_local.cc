// Store's calls for clients that read mapped memory.
#include <set>

#include "kvstore/live_index.h"
#include "kvstore/memory_limits.h"
#include "kvstore/store_impl.h"
#include "kvstore/verify.h"

namespace pqcached::kvstore {

absl::StatusOr<SessionMemory> StoreImpl::OpenLocalSession(std::string_view session,
                                                          uint64_t boot_word) {
  return local_.Open(session, boot_word);
}

absl::StatusOr<SharedMemory> StoreImpl::OpenPool(std::string_view tenant, uint64_t cache_id) {
  const auto cache = FindCache(tenant, cache_id);
  if (!cache.ok()) return cache.status();
  return (*cache)->pool->Share();
}

absl::StatusOr<SharedMemory> StoreImpl::OpenStaging(std::string_view session, uint64_t slot_bytes,
                                                    uint32_t slot_count) {
  return local_.OpenStaging(session, slot_bytes, slot_count);
}

absl::StatusOr<StagedBytes> StoreImpl::ClaimStaging(std::string_view session,
                                                    const StagingReference& reference) {
  return local_.ClaimStaging(session, reference);
}

absl::StatusOr<AttachedSequence> StoreImpl::Attach(std::string_view tenant, uint64_t sequence_id,
                                                   std::string_view session,
                                                   const LeaseState& lease) {
  auto found = Find(tenant, sequence_id);
  if (!found.ok()) return found.status();
  const auto leased = found->sequence->Read();
  if (!leased.ok()) return leased.status();
  // Verified only once: later content is written by this process.
  if (absl::Status status = VerifyList(*found->cache, *(*leased)->list); !status.ok()) {
    return status;
  }
  return local_.Attach(std::move(found->cache), std::move(found->sequence), session, lease);
}

absl::StatusOr<VersionedImage> StoreImpl::RefreshLease(std::string_view session,
                                                       const LeaseState& lease) {
  return local_.Refresh(session, lease);
}

absl::Status StoreImpl::Detach(std::string_view session, uint64_t lease_id) {
  return local_.Detach(session, lease_id);
}

std::vector<LeaseInfo> StoreImpl::ListLeases() { return local_.ListLeases(); }

StoreStats StoreImpl::Stats() {
  StoreStats stats{.staging_bytes = local_.staging_bytes(),
                   .live_work_count = engine_->live->CountBusySequences()};
  for (const LeaseInfo& lease : local_.ListLeases()) {
    ++stats.lease_count;
    if (lease.revoked) ++stats.revoked_lease_count;
  }
  stats.data_loss_count = engine_->data_loss_count.load();
  stats.recovered_sequences = recovery_.sequences;
  for (const auto& cache : AllCaches()) {
    stats.quarantined_bytes += cache->pool->usage().quarantined_bytes;
  }
  std::vector<std::shared_ptr<Sequence>> sequences;
  {
    const MutexLock lock(&mutex_);
    for (const auto& [id, found] : sequences_) {
      sequences.push_back(found.sequence);
      if (found.retained()) ++stats.cached_prefix_count;
      if (found.sequence->holds().pinned()) ++stats.pinned_count;
    }
  }
  stats.evicted_sequences = evicted_sequences_.load();
  stats.evicted_bytes = evicted_bytes_.load();
  stats.prompt_tokens = prompt_tokens_.load();
  stats.matched_tokens = matched_tokens_.load();
  stats.memory_available_bytes = ReadMemoryLimits(engine_->options.memory_root).available_bytes;
  std::set<const SegmentRows*> seen;
  std::set<const SegmentRows*> shared;
  for (const auto& sequence : sequences) {
    const auto snapshot = sequence->Peek();
    if (!snapshot.ok()) continue;  // dropped concurrently
    for (const SegmentEntry& entry : (*snapshot)->list->segments) {
      const SegmentRows* rows = entry.rows.get();
      if (seen.insert(rows).second || !shared.insert(rows).second) continue;
      stats.shared_bytes += rows->used_bytes();
    }
  }
  return stats;
}

}  // namespace pqcached::kvstore

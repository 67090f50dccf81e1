// Store's descriptions and statistics.
#include <algorithm>
#include <set>
#include <vector>

#include "kernels/base/status_macros.h"
#include "kvstore/limits/memory_limits.h"
#include "kvstore/sequence/describe.h"
#include "kvstore/store/store_impl.h"

namespace pqcached::kvstore {
namespace {

// Returns whether a call for `asked` reaches the tenant.
bool Covers(std::string_view asked, std::string_view tenant) {
  return asked == kAllTenants || asked == tenant;
}

}  // namespace

CacheInfo StoreImpl::Describe(const Cache& cache) const {
  const PoolUsage usage = cache.pool->usage();
  CacheInfo info{.cache_id = cache.cache_id,
                 .tenant = cache.tenant,
                 .spec = cache.spec,
                 .capacity_bytes = usage.capacity_bytes,
                 .used_bytes = usage.used_bytes,
                 .free_bytes = usage.free_bytes,
                 .largest_free_bytes = usage.largest_free_bytes,
                 .page_bytes = cache.pool->page_bytes(),
                 .limit_bytes = usage.limit_bytes,
                 .quarantined_bytes = usage.quarantined_bytes,
                 .prefill = {cache.prefill_times->measures(), cache.prefill_times->Cost()}};
  if (cache.spec.grows) {
    info.capacity_bytes = std::max(cache.pool->granted_bytes(), usage.used_bytes);
    info.free_bytes = info.capacity_bytes - usage.used_bytes;
    info.largest_free_bytes = std::min(info.largest_free_bytes, info.free_bytes);
  }
  info.cached_prefix_count =
      static_cast<uint32_t>(sequences_.RetainedOfCache(cache.cache_id).size());
  info.sequence_count = sequences_.CountOfCache(cache.cache_id);
  if (cache.pages != nullptr) info.pages = cache.pages->counts();
  return info;
}

std::vector<CacheInfo> StoreImpl::ListCaches(std::string_view tenant) {
  std::vector<CacheInfo> infos;
  for (const auto& cache : caches_.OfTenant(tenant)) infos.push_back(Describe(*cache));
  return infos;
}

absl::StatusOr<std::vector<SequenceInfo>> StoreImpl::ListSequences(std::string_view tenant,
                                                                   uint64_t cache_id) {
  ASSIGN_OR_RETURN(const auto cache, FindCacheForAdmin(tenant, cache_id));
  std::vector<SequenceInfo> infos;
  for (const StoredSequence& stored : sequences_.OfCache(cache_id)) {
    const auto snapshot = stored.sequence->Peek();
    if (!snapshot.ok()) continue;  // dropped concurrently
    infos.push_back(kvstore::Describe(*stored.cache, *stored.sequence, **snapshot));
  }
  std::sort(infos.begin(), infos.end(), [](const SequenceInfo& a, const SequenceInfo& b) {
    return a.sequence_id < b.sequence_id;
  });
  return infos;
}

absl::StatusOr<SequenceInfo> StoreImpl::DescribeSequence(std::string_view tenant,
                                                         uint64_t sequence_id) {
  ASSIGN_OR_RETURN(const auto found, FindForAdmin(tenant, sequence_id));
  ASSIGN_OR_RETURN(const auto snapshot, found.sequence->Peek());
  SequenceInfo info = kvstore::Describe(*found.cache, *found.sequence, *snapshot);
  info.live_index = live_.StatusOf(sequence_id);
  if (const auto spec = live_.SpecOf(sequence_id)) info.live_index_descriptor = spec->index;
  return info;
}

void StoreImpl::CountSequences(std::string_view tenant, StoreStats& stats) const {
  std::set<const SegmentRows*> seen;
  std::set<const SegmentRows*> shared;
  for (const StoredSequence& stored : sequences_.All()) {
    if (!Covers(tenant, stored.cache->tenant)) continue;
    if (stored.retained()) ++stats.cached_prefix_count;
    if (stored.sequence->holds().pinned()) ++stats.pinned_count;
    const auto snapshot = stored.sequence->Peek();
    if (!snapshot.ok()) continue;  // dropped concurrently
    for (const SegmentEntry& entry : (*snapshot)->list->segments) {
      const SegmentRows* rows = entry.rows.get();
      if (seen.insert(rows).second || !shared.insert(rows).second) continue;
      stats.shared_bytes += rows->used_bytes();
    }
  }
}

StoreStats StoreImpl::Stats(std::string_view tenant) {
  StoreStats stats{.staging_bytes = local_.staging_bytes(tenant)};
  for (const LeaseInfo& lease : local_.ListLeases(tenant)) {
    ++stats.lease_count;
    if (lease.revoked) ++stats.revoked_lease_count;
  }
  for (const auto& cache : caches_.OfTenant(tenant)) {
    stats.quarantined_bytes += cache->pool->usage().quarantined_bytes;
    if (cache->pages != nullptr) stats.pages += cache->pages->counts();
  }
  for (MemoryAccount& account : ledger_->Accounts()) {
    if (Covers(tenant, account.tenant)) stats.memory.push_back(std::move(account));
  }
  CountSequences(tenant, stats);
  if (tenant == kAllTenants) ReportSidecar(stats);
  return stats;
}

// Adds what no tenant may know of the others.
void StoreImpl::ReportSidecar(StoreStats& stats) const {
  stats.live_work_count = live_.CountBusySequences();
  stats.data_loss_count = counters_.data_loss_count.load();
  stats.recovered_sequences = recovery_.sequences;
  stats.evicted_sequences = evictor_.evicted_sequences();
  stats.evicted_bytes = evictor_.evicted_bytes();
  stats.prompt_tokens = prefixes_.prompt_tokens();
  stats.matched_tokens = prefixes_.matched_tokens();
  if (const size_t aside = options_.keeper == nullptr ? 0 : options_.keeper->SetAsideBytes();
      aside > 0) {
    stats.memory.push_back({.tenant = {},
                            .use = MemoryUse::kSetAside,
                            .promised_bytes = aside,
                            .allocated_bytes = aside});
  }
  stats.memory_available_bytes = ReadMemoryLimits(options_.memory_root).available_bytes;
}

}  // namespace pqcached::kvstore

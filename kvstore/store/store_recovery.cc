// Store's calls that recover state of an earlier process, and record state for the next one.
#include <algorithm>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/base/status_macros.h"
#include "kvstore/clock.h"
#include "kvstore/memory/keeper.h"
#include "kvstore/refusal.h"
#include "kvstore/store/pool_move.h"
#include "kvstore/store/recovery.h"
#include "kvstore/store/store_impl.h"

namespace pqcached::kvstore {
namespace {

void NoteDropped(std::string what, RecoveryReport& report) {
  constexpr size_t kMost = 16;
  if (report.dropped.size() < kMost) report.dropped.push_back(std::move(what));
}

}  // namespace

absl::Status StoreImpl::Recover() {
  if (root_ == nullptr) return absl::OkStatus();
  const SteadyTime began = SteadyTime::Now();
  recovery_.recovered = root_->recovered();
  recovery_.dropped_records = root_->dropped_records();
  for (const CacheRecord& record : root_->caches()) {
    absl::Status status = RecoverCache(record);
    if (status.ok()) continue;
    if (!absl::IsDataLoss(status)) return status;  // the next attempt may succeed
    ++recovery_.dropped_records;
    NoteDropped(absl::StrCat("cache ", record.cache_id, ": ", TextOf(status)), recovery_);
    root_->RemoveCache(record.cache_id);
    for (const std::string& name : record.names()) {
      RETURN_IF_ERROR(options_.keeper->Release(name));
    }
  }
  recovery_.seconds = absl::ToDoubleSeconds(SteadyTime::Now() - began);
  return absl::OkStatus();
}

absl::Status StoreImpl::RecoverCache(const CacheRecord& record) {
  ASSIGN_OR_RETURN(const std::shared_ptr<const Cache> cache,
                   cache_memory_.Recover(record, recovery_));
  RecoveredCache recovered;
  if (cache->pages != nullptr) {
    recovery_.pages += cache->pages->Recover(recovered.dropped);
  } else {
    recovered = RecoverSequences(*cache);
  }
  const PoolUsage usage = cache->pool->usage();
  ++recovery_.caches;
  recovery_.sequences += static_cast<uint32_t>(recovered.sequences.size());
  recovery_.segments += recovered.segments;
  recovery_.dropped_records += static_cast<uint32_t>(recovered.dropped.size());
  for (const std::string& what : recovered.dropped) {
    NoteDropped(absl::StrCat("cache ", cache->cache_id, ": ", what), recovery_);
  }
  recovery_.bytes += usage.used_bytes - usage.quarantined_bytes;
  recovery_.quarantined_bytes += usage.quarantined_bytes;
  counters_.next_segment_id =
      std::max(counters_.next_segment_id.load(), cache->records->next_segment_id());
  std::vector<std::string> sessions;
  for (const KeptSession& kept : KeptSessions()) {
    if (kept.tenant == cache->tenant) sessions.push_back(kept.id);
  }
  caches_.Restore(cache, sessions);
  for (const RecoveredSequence& found : recovered.sequences) {
    root_->MarkIdUsed(found.identity.sequence_id);
    sequences_.Restore({cache, found.sequence, found.names});
    if (!found.identity.group_key.empty()) ranks_.Restore(*cache, found.sequence);
  }
  InstallReclaimer(cache);
  for (const RecoveredSequence& found : recovered.sequences) {
    checksums_->Add(cache, found.sequence);
    if (!found.identity.live_index.has_value()) continue;
    RETURN_IF_ERROR(live_.Add(cache, found.sequence, *found.identity.live_index));
  }
  return absl::OkStatus();
}

RecoveryReport StoreImpl::Recovery() const { return recovery_; }

absl::Status StoreImpl::KeepSession(const KeptSession& session) {
  return root_ == nullptr ? absl::OkStatus() : root_->KeepSession(session);
}

std::vector<KeptSession> StoreImpl::KeptSessions() const {
  return root_ == nullptr ? std::vector<KeptSession>{} : root_->KeptSessions();
}

uint32_t StoreImpl::EndQuarantineExcept(const CacheFilter& may_be_mapped) {
  uint32_t ended = 0;
  for (const auto& cache : caches_.All()) {
    if (!may_be_mapped(cache->cache_id) && cache->pool->EndQuarantine()) ++ended;
  }
  return ended;
}

absl::Status StoreImpl::PlanPoolMove(uint64_t cache_id) {
  ASSIGN_OR_RETURN(const auto cache, FindCacheForAdmin(kAllTenants, cache_id));
  if (cache->records == nullptr) {
    return FailedPrecondition("cache_id", "the cache does not outlive the worker");
  }
  return PoolMove(*options_.keeper, cache_id).Plan(options_.strict_memory);
}

}  // namespace pqcached::kvstore

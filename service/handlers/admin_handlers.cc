#include "service/handlers/admin_handlers.h"

#include <algorithm>
#include <thread>
#include <utility>

#include "kernels/base/exec.h"
#include "kernels/base/status_macros.h"
#include "service/base/log.h"
#include "service/base/version.h"
#include "service/wire/wire.h"

namespace pqcached::service {
uint64_t AdminHandlers::UptimeSeconds() const {
  return static_cast<uint64_t>(absl::ToInt64Seconds(kvstore::SteadyTime::Now() - started_));
}

absl::Status AdminHandlers::GetServerInfo(const Caller& caller, const v1::GetServerInfoRequest&,
                                          v1::GetServerInfoResponse* response) {
  response->set_version(std::string(kVersion));
  response->set_protocol_version(kProtocolVersion);
  for (const absl::string_view capability : kCapabilities)
    response->add_capabilities(std::string(capability));
  if (parts_.config.broker) {
    for (const absl::string_view capability : kLocalCapabilities)
      response->add_capabilities(std::string(capability));
  }
  response->set_boot_id(parts_.boot_id);
  response->set_uptime_seconds(UptimeSeconds());
  response->set_kernel_level(
      std::string(kernels::LevelName(StoreOptionsOf(parts_.config).exec.level)));
  for (const kernels::Level level : kernels::AvailableLevels()) {
    response->add_kernel_levels(std::string(kernels::LevelName(level)));
  }
  response->set_max_message_bytes(parts_.config.max_message_bytes);
  response->set_threads(parts_.config.threads != 0 ? parts_.config.threads
                                                   : std::thread::hardware_concurrency());
  if (caller.role != Role::kOperator) return absl::OkStatus();
  for (const auto& [key, value] : DescribeConfig(parts_.config))
    (*response->mutable_config())[key] = value;
  return absl::OkStatus();
}

absl::Status AdminHandlers::ListCaches(const Caller& caller, const v1::ListCachesRequest& request,
                                       v1::ListCachesResponse* response) {
  for (const kvstore::CacheInfo& cache : parts_.store.ListCaches(caller.tenant())) {
    if (!request.tenant().empty() && request.tenant() != cache.tenant) continue;
    ToWire(cache, response->add_caches());
  }
  return absl::OkStatus();
}

absl::Status AdminHandlers::ListSequences(const Caller& caller,
                                          const v1::ListSequencesRequest& request,
                                          v1::ListSequencesResponse* response) {
  std::vector<uint64_t> cache_ids;
  if (request.cache_id() != 0) {
    cache_ids.push_back(request.cache_id());
  } else {
    for (const kvstore::CacheInfo& cache : parts_.store.ListCaches(caller.tenant()))
      cache_ids.push_back(cache.cache_id);
  }
  for (const uint64_t cache_id : cache_ids) {
    ASSIGN_OR_RETURN(const std::vector<kvstore::SequenceInfo> sequences,
                     parts_.store.ListSequences(caller.tenant(), cache_id));
    for (const kvstore::SequenceInfo& sequence : sequences) {
      ToWire(sequence, /*brief=*/true, response->add_sequences());
    }
  }
  return absl::OkStatus();
}

absl::Status AdminHandlers::DescribeSequence(const Caller& caller,
                                             const v1::DescribeSequenceRequest& request,
                                             v1::DescribeSequenceResponse* response) {
  const absl::StatusOr<kvstore::SequenceInfo> sequence =
      parts_.store.DescribeSequence(caller.tenant(), request.sequence_id());
  if (sequence.ok()) ToWire(*sequence, /*brief=*/false, response->mutable_sequence());
  return sequence.status();
}

absl::Status AdminHandlers::Stats(const Caller& caller, const v1::StatsRequest&,
                                  v1::StatsResponse* response) {
  response->set_uptime_seconds(UptimeSeconds());
  response->set_session_count(parts_.sessions.CountOf(caller.tenant()));
  uint64_t capacity_bytes = 0;
  uint64_t used_bytes = 0;
  uint64_t free_bytes = 0;
  uint32_t sequence_count = 0;
  uint64_t largest_free_bytes = 0;
  uint64_t whole_bytes = 0;  // sum over the pools of the longest free run
  const std::vector<kvstore::CacheInfo> caches = parts_.store.ListCaches(caller.tenant());
  for (const kvstore::CacheInfo& cache : caches) {
    capacity_bytes += cache.capacity_bytes;
    used_bytes += cache.used_bytes;
    free_bytes += cache.free_bytes;
    sequence_count +=
        cache.sequence_count - std::min(cache.sequence_count, cache.cached_prefix_count);
    largest_free_bytes = std::max(largest_free_bytes, uint64_t{cache.largest_free_bytes});
    whole_bytes += cache.largest_free_bytes;
  }
  response->set_cache_count(static_cast<uint32_t>(caches.size()));
  response->set_sequence_count(sequence_count);
  response->set_pool_capacity_bytes(capacity_bytes);
  response->set_pool_used_bytes(used_bytes);
  response->set_pool_free_bytes(free_bytes);
  const kvstore::StoreStats stats = parts_.store.Stats(caller.tenant());
  response->set_lease_count(stats.lease_count);
  response->set_revoked_lease_count(stats.revoked_lease_count);
  response->set_staging_bytes(stats.staging_bytes);
  response->set_shared_bytes(stats.shared_bytes);
  response->set_cached_prefix_count(stats.cached_prefix_count);
  response->set_pinned_count(stats.pinned_count);
  response->set_evicted_sequences(stats.evicted_sequences);
  response->set_evicted_bytes(stats.evicted_bytes);
  response->set_prompt_tokens(stats.prompt_tokens);
  response->set_matched_tokens(stats.matched_tokens);
  response->set_memory_available_bytes(stats.memory_available_bytes);
  response->set_largest_free_bytes(largest_free_bytes);
  response->set_fragmentation(
      free_bytes == 0 ? 0 : 1 - static_cast<double>(whole_bytes) / static_cast<double>(free_bytes));
  response->set_draining(parts_.gate.refuses_new_work());
  ToWire(stats.pages, response->mutable_pages());
  for (const kvstore::MemoryAccount& account : stats.memory) {
    v1::MemoryAccount* message = response->add_memory();
    message->set_tenant(account.tenant);
    message->set_use(static_cast<v1::MemoryUse>(account.use));
    message->set_promised_bytes(account.promised_bytes);
    message->set_allocated_bytes(account.allocated_bytes);
  }
  if (caller.role != Role::kOperator) return absl::OkStatus();
  response->set_builds_in_flight(parts_.gate.builds_in_flight() + stats.live_work_count);
  for (const RpcStats::Row& row : parts_.stats.Snapshot()) {
    v1::RpcStats* message = response->add_rpcs();
    message->set_method(std::string(RpcName(row.rpc)));
    for (size_t status = 0; status < RpcStats::kStatusCount; ++status) {
      if (row.count_by_status[status] == 0) continue;
      const std::string name(StatusName(static_cast<absl::StatusCode>(status)));
      (*message->mutable_count_by_status())[name] = row.count_by_status[status];
    }
    message->set_seconds_total(absl::ToDoubleSeconds(row.total));
    message->set_seconds_max(absl::ToDoubleSeconds(row.longest));
  }
  return absl::OkStatus();
}

absl::Status AdminHandlers::SetLogLevel(const Caller&, const v1::SetLogLevelRequest& request,
                                        v1::SetLogLevelResponse* response) {
  const absl::StatusOr<std::string> previous = parts_.log.SetLevel(request.level());
  if (previous.ok()) response->set_previous_level(*previous);
  return previous.status();
}

absl::Status AdminHandlers::ListLeases(const Caller& caller, const v1::ListLeasesRequest&,
                                       v1::ListLeasesResponse* response) {
  for (const kvstore::LeaseInfo& lease : parts_.store.ListLeases(caller.tenant())) {
    ToWire(lease, parts_.sessions.PeerPidOf(lease.session), response->add_leases());
  }
  return absl::OkStatus();
}

}  // namespace pqcached::service

// Admin rpcs that change or test the sidecar, and those about sessions and the limits of tenants.
#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "kernels/base/status_macros.h"
#include "proto/codec/index.h"
#include "service/base/log.h"
#include "service/base/refusal.h"
#include "service/config/tenant_uids.h"
#include "service/handlers/admin_handlers.h"
#include "service/handlers/self_test.h"
#include "service/session/tenant_limit_table.h"
#include "service/wire/wire.h"

namespace pqcached::service {
namespace {

// Longest wait for calls in progress that use what EraseTenant drops.
constexpr absl::Duration kErasePatience = absl::Seconds(5);

void ToWire(const TenantLimits& limits, v1::TenantLimits* message) {
  message->set_sessions(limits.sessions);
  message->set_caches(limits.caches);
  message->set_staging_bytes(limits.staging_bytes);
  message->set_builds(limits.builds);
  message->set_calls(limits.calls);
  message->set_weight(limits.weight);
  message->set_pool_bytes(limits.pool_bytes);
  message->set_guaranteed_bytes(limits.guaranteed_bytes);
}

TenantLimits FromWire(const v1::TenantLimits& message) {
  return {.sessions = message.sessions(),
          .caches = message.caches(),
          .staging_bytes = message.staging_bytes(),
          .builds = message.builds(),
          .calls = message.calls(),
          .weight = message.weight(),
          .pool_bytes = message.pool_bytes(),
          .guaranteed_bytes = message.guaranteed_bytes()};
}

// Returns the number of sequences by session.
std::map<std::string, uint32_t> CountSequences(kvstore::Store& store, std::string_view tenant) {
  std::map<std::string, uint32_t> counts;
  for (const kvstore::CacheInfo& cache : store.ListCaches(tenant)) {
    const auto sequences = store.ListSequences(cache.tenant, cache.cache_id);
    if (!sequences.ok()) continue;  // dropped concurrently
    for (const kvstore::SequenceInfo& each : *sequences) counts[each.session] += 1;
  }
  return counts;
}

}  // namespace

absl::Status AdminHandlers::Evict(const Caller& caller, const v1::EvictRequest& request,
                                  v1::EvictResponse*) {
  absl::Status status = parts_.store.EvictSequence(caller.tenant(), request.sequence_id());
  if (status.ok()) parts_.log.Info("sequence_evicted", {{"sequence_id", request.sequence_id()}});
  return status;
}

absl::Status AdminHandlers::Pin(const Caller& caller, const v1::PinRequest& request,
                                v1::PinResponse*) {
  if (request.ttl_ms() > static_cast<uint64_t>(absl::ToInt64Milliseconds(kvstore::kMaxPin))) {
    return InvalidArgument("ttl_ms", absl::StrCat(request.ttl_ms(), ", must be at most ",
                                                  absl::ToInt64Milliseconds(kvstore::kMaxPin)));
  }
  return MoveField(
      "ttl", "ttl_ms",
      parts_.store.PinSequence(caller.tenant(), request.sequence_id(),
                               absl::Milliseconds(static_cast<int64_t>(request.ttl_ms()))));
}

absl::Status AdminHandlers::Drain(const Caller&, const v1::DrainRequest& request,
                                  v1::DrainResponse* response) {
  const bool draining = !request.resume();
  parts_.gate.SetRefuseNewWork(draining);
  parts_.set_serving(!draining);
  uint32_t sequences = 0;
  for (const kvstore::CacheInfo& cache : parts_.store.ListCaches(kvstore::kAllTenants)) {
    sequences += cache.sequence_count - std::min(cache.sequence_count, cache.cached_prefix_count);
  }
  response->set_draining(draining);
  response->set_session_count(parts_.sessions.count());
  response->set_sequence_count(sequences);
  response->set_calls_in_flight(static_cast<uint32_t>(parts_.gate.in_flight_count()) - 1);
  parts_.log.Info(draining ? "draining" : "serving_again",
                  {{"sessions", response->session_count()}, {"sequences", sequences}});
  return absl::OkStatus();
}

absl::Status AdminHandlers::SelfTest(const Caller& caller, const v1::SelfTestRequest&,
                                     v1::SelfTestResponse* response) {
  // It occupies all cores, so that several would starve the tenants.
  if (self_test_runs_.exchange(true)) {
    return ResourceExhausted("", "another self-test is running", kRetryMemory);
  }
  const absl::Cleanup ended = [this] { self_test_runs_ = false; };
  bool passed = true;
  for (const SelfTestCheck& check : RunSelfTest([&caller] { return caller.Check().ok(); })) {
    v1::SelfTestCheck* message = response->add_checks();
    message->set_name(check.name);
    message->set_passed(check.status.ok());
    message->set_detail(check.status.ok() ? check.detail : std::string(check.status.message()));
    message->set_seconds(check.seconds);
    passed = passed && check.status.ok();
    if (!check.status.ok()) {
      parts_.log.Error("self_test_failed",
                       {{"check", check.name}, {"message", check.status.message()}});
    }
  }
  response->set_passed(passed);
  return absl::OkStatus();
}

absl::Status AdminHandlers::EraseTenant(const Caller&, const v1::EraseTenantRequest& request,
                                        v1::EraseTenantResponse* response) {
  const std::string& tenant = request.tenant();
  if (!IsTenantName(tenant)) {
    return InvalidArgument("tenant", "must be 1..64 bytes of [a-z0-9_.-]");
  }
  const std::vector<Session> sessions = parts_.sessions.OfTenant(tenant);
  parts_.end_sessions([tenant](const Session& session) { return session.tenant == tenant; });
  for (const Session& session : sessions) parts_.store.DropSession(session.id);
  ASSIGN_OR_RETURN(const kvstore::ErasedTenant erased,
                   parts_.store.EraseTenant(tenant, kErasePatience));
  response->set_ended_sessions(static_cast<uint32_t>(sessions.size()));
  response->set_dropped_sequences(erased.sequences);
  response->set_dropped_cached_prefixes(erased.cached_prefixes);
  response->set_erased_bytes(erased.bytes);
  response->set_remaining_bytes(erased.remaining_bytes);
  response->set_removed_files(erased.set_aside_files);
  response->set_removed_bytes(erased.set_aside_bytes);
  for (const std::string& folder : erased.unreadable_folders) {
    response->add_unreadable_folders(folder);
  }
  return absl::OkStatus();
}

absl::Status AdminHandlers::DropCache(const Caller& caller, const v1::DropCacheRequest& request,
                                      v1::DropCacheResponse* response) {
  if (request.force() && caller.role != Role::kOperator) {
    return PermissionDenied("force", "is for operators, on the admin socket");
  }
  ASSIGN_OR_RETURN(const kvstore::DroppedCache dropped,
                   parts_.store.DropCache(caller.tenant(), request.cache_id(), request.force()));
  response->set_dropped_sequences(dropped.sequences);
  response->set_freed_bytes(dropped.bytes);
  return absl::OkStatus();
}

absl::Status AdminHandlers::ListSessions(const Caller& caller, const v1::ListSessionsRequest&,
                                         v1::ListSessionsResponse* response) {
  const std::map<std::string, uint32_t> sequences = CountSequences(parts_.store, caller.tenant());
  for (const SessionInfo& info : parts_.sessions.List(caller.tenant())) {
    v1::SessionDescription* message = response->add_sessions();
    message->set_session_number(info.session.number);
    message->set_tenant(info.session.tenant);
    message->set_client_name(info.session.client_name);
    message->set_peer_pid(info.session.peer_pid);
    message->set_age_seconds(absl::ToDoubleSeconds(info.age));
    message->set_detached(info.detached);
    const auto count = sequences.find(info.session.id);
    message->set_sequence_count(count == sequences.end() ? 0 : count->second);
  }
  return absl::OkStatus();
}

absl::Status AdminHandlers::EndSession(const Caller& caller, const v1::EndSessionRequest& request,
                                       v1::EndSessionResponse* response) {
  const uint64_t number = request.session_number();
  const std::vector<SessionInfo> open = parts_.sessions.List(caller.tenant());
  const auto found = std::find_if(open.begin(), open.end(), [&](const SessionInfo& each) {
    return each.session.number == number;
  });
  if (found == open.end()) {
    return NotFound("session_number", absl::StrCat("no session ", number));
  }
  const std::map<std::string, uint32_t> sequences = CountSequences(parts_.store, caller.tenant());
  const auto count = sequences.find(found->session.id);
  response->set_dropped_sequences(count == sequences.end() ? 0 : count->second);
  parts_.end_sessions([number](const Session& session) { return session.number == number; });
  parts_.store.DropSession(found->session.id);
  return absl::OkStatus();
}

v1::TenantLimitsDescription AdminHandlers::DescribeLimits(const std::string& tenant) const {
  v1::TenantLimitsDescription message;
  message.set_tenant(tenant);
  ToWire(parts_.limits.Of(tenant), message.mutable_limits());
  if (tenant == kOtherTenants) return message;
  const WorkCounts work = parts_.count_work(tenant);
  TenantLimits used{.sessions = parts_.sessions.CountOf(tenant),
                    .staging_bytes = parts_.store.Stats(tenant).staging_bytes,
                    .builds = work.running_builds,
                    .calls = work.waiting_calls};
  for (const kvstore::CacheInfo& cache : parts_.store.ListCaches(tenant)) {
    used.caches += 1;
    used.pool_bytes += cache.capacity_bytes;
  }
  ToWire(used, message.mutable_used());
  return message;
}

absl::Status AdminHandlers::ListTenantLimits(const Caller& caller,
                                             const v1::ListTenantLimitsRequest&,
                                             v1::ListTenantLimitsResponse* response) {
  std::set<std::string> tenants;
  if (caller.role == Role::kOperator) {
    for (const std::string& name : parts_.limits.Named()) tenants.insert(name);
    tenants.insert(kOtherTenants);
    for (const SessionInfo& info : parts_.sessions.List(kvstore::kAllTenants)) {
      tenants.insert(info.session.tenant);
    }
    for (const auto& cache : parts_.store.ListCaches(kvstore::kAllTenants)) {
      tenants.insert(cache.tenant);
    }
  } else {
    tenants.insert(std::string(caller.tenant()));
  }
  for (const std::string& tenant : tenants) *response->add_tenants() = DescribeLimits(tenant);
  return absl::OkStatus();
}

absl::Status AdminHandlers::ListIndexTypes(const Caller&, const v1::ListIndexTypesRequest&,
                                           v1::ListIndexTypesResponse* response) {
  for (const kvstore::IndexType* type : kvstore::IndexTypes()) {
    codec::Encode(*type, response->add_types());
  }
  return absl::OkStatus();
}

absl::Status AdminHandlers::SetTenantLimits(const Caller&,
                                            const v1::SetTenantLimitsRequest& request,
                                            v1::SetTenantLimitsResponse* response) {
  RETURN_IF_ERROR(parts_.limits.Change(request.tenant(), FromWire(request.limits())));
  parts_.store.SetTenantQuotas(parts_.limits.Quotas());
  *response->mutable_tenant() = DescribeLimits(request.tenant());
  return absl::OkStatus();
}

absl::Status AdminHandlers::EndQuarantine(const Caller&, const v1::EndQuarantineRequest& request,
                                          v1::EndQuarantineResponse* response) {
  ASSIGN_OR_RETURN(const uint32_t pools, parts_.detached.MovePools(request.cache_id()));
  response->set_moving_pools(pools);
  return absl::OkStatus();
}

kvstore::ImagePlace AdminHandlers::PlaceOf(const Caller& caller, const std::string& name) const {
  return {.directory = parts_.config.image_directory, .name = name, .keep_going = [&caller] {
            return caller.Check().ok();
          }};
}

absl::Status AdminHandlers::ExportSequence(const Caller& caller,
                                           const v1::ExportSequenceRequest& request,
                                           v1::ExportSequenceResponse* response) {
  const auto exported = parts_.store.ExportSequence(caller.tenant(), request.sequence_id(),
                                                    PlaceOf(caller, request.name()));
  if (!exported.ok()) {
    RETURN_IF_ERROR(caller.Check());  // why the work was given up
    return exported.status();
  }
  response->set_token_count(exported->token_count);
  response->set_image_count(exported->image_count);
  response->set_bytes(exported->bytes);
  return absl::OkStatus();
}

absl::Status AdminHandlers::ImportSequence(const Caller& caller,
                                           const v1::ImportSequenceRequest& request,
                                           v1::ImportSequenceResponse* response) {
  const auto imported = parts_.store.ImportSequence(caller.tenant(), request.cache_id(),
                                                    PlaceOf(caller, request.name()));
  if (!imported.ok()) {
    RETURN_IF_ERROR(caller.Check());
    return imported.status();
  }
  response->set_sequence_id(imported->sequence_id);
  response->set_token_count(imported->token_count);
  response->set_shared_tokens(imported->shared_tokens);
  response->set_image_count(imported->image_count);
  response->set_bytes(imported->bytes);
  return absl::OkStatus();
}

}  // namespace pqcached::service

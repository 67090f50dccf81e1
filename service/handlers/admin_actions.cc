// Admin rpcs that change or test the sidecar: Evict, Pin, Drain, SelfTest,
// EraseTenant, DropCache.
#include <algorithm>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "kernels/base/status_macros.h"
#include "service/base/log.h"
#include "service/base/refusal.h"
#include "service/config/tenant_uids.h"
#include "service/handlers/admin_handlers.h"
#include "service/handlers/self_test.h"
#include "service/wire/wire.h"

namespace pqcached::service {
namespace {

// Longest wait for calls in progress that use what EraseTenant drops.
constexpr absl::Duration kErasePatience = absl::Seconds(5);

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
  parts_.end_sessions(tenant);
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

}  // namespace pqcached::service

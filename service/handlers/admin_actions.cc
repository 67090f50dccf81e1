// Admin rpcs that change or test the sidecar: Evict, Pin, Drain, SelfTest.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "service/base/log.h"
#include "service/handlers/admin_handlers.h"
#include "service/handlers/self_test.h"
#include "service/wire/wire.h"

namespace pqcached::service {

absl::Status AdminHandlers::Evict(const Caller&, const v1::EvictRequest& request,
                                  v1::EvictResponse*) {
  absl::Status status = parts_.store.EvictSequence(request.sequence_id());
  if (status.ok()) parts_.log.Info("sequence_evicted", {{"sequence_id", request.sequence_id()}});
  return status;
}

absl::Status AdminHandlers::Pin(const Caller&, const v1::PinRequest& request, v1::PinResponse*) {
  if (request.ttl_ms() > static_cast<uint64_t>(absl::ToInt64Milliseconds(kvstore::kMaxPin))) {
    return InvalidArgument("ttl_ms", absl::StrCat(request.ttl_ms(), ", must be at most ",
                                                  absl::ToInt64Milliseconds(kvstore::kMaxPin)));
  }
  return MoveField(
      "ttl", "ttl_ms",
      parts_.store.PinSequence(kAllTenants, request.sequence_id(),
                               absl::Milliseconds(static_cast<int64_t>(request.ttl_ms()))));
}

absl::Status AdminHandlers::Drain(const Caller&, const v1::DrainRequest& request,
                                  v1::DrainResponse* response) {
  const bool draining = !request.resume();
  parts_.gate.SetRefuseNewWork(draining);
  parts_.set_serving(!draining);
  uint32_t sequences = 0;
  for (const kvstore::CacheInfo& cache : parts_.store.ListCaches(kAllTenants)) {
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

}  // namespace pqcached::service

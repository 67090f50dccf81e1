// Admin rpcs that change or test the sidecar: Evict, Pin, Drain, SelfTest.
#include <utility>

#include "absl/strings/str_cat.h"
#include "service/base/log.h"
#include "service/handlers/self_test.h"
#include "service/rpc/admin_service.h"
#include "service/wire/wire.h"

namespace pqcached::service {
namespace {

const std::string kAllTenants;

}  // namespace

AdminService::Reactor* AdminService::Evict(Context* context, const v1::EvictRequest* request,
                                           v1::EvictResponse*) {
  return calls_.Unary(context, Rpc::kEvict, Access::kAnyone, [=, this](const Call&) {
    const absl::Status status = store_.EvictSequence(request->sequence_id());
    if (status.ok()) log_.Info("sequence_evicted", {{"sequence_id", request->sequence_id()}});
    return status;
  });
}

AdminService::Reactor* AdminService::Pin(Context* context, const v1::PinRequest* request,
                                         v1::PinResponse*) {
  return calls_.Unary(context, Rpc::kPin, Access::kAnyone, [=, this](const Call&) -> absl::Status {
    if (request->ttl_ms() > static_cast<uint64_t>(absl::ToInt64Milliseconds(kvstore::kMaxPin))) {
      return InvalidArgument("ttl_ms", absl::StrCat(request->ttl_ms(), ", must be at most ",
                                                    absl::ToInt64Milliseconds(kvstore::kMaxPin)));
    }
    return MoveField(
        "ttl", "ttl_ms",
        store_.PinSequence(kAllTenants, request->sequence_id(),
                           absl::Milliseconds(static_cast<int64_t>(request->ttl_ms()))));
  });
}

AdminService::Reactor* AdminService::Drain(Context* context, const v1::DrainRequest* request,
                                           v1::DrainResponse* response) {
  return calls_.Unary(context, Rpc::kDrain, Access::kAnyone, [=, this](const Call&) {
    const bool draining = !request->resume();
    calls_.SetRefuseNewWork(draining);
    set_serving_(!draining);
    uint32_t sequences = 0;
    for (const kvstore::CacheInfo& cache : store_.ListCaches(kAllTenants)) {
      sequences += cache.sequence_count - std::min(cache.sequence_count, cache.cached_prefix_count);
    }
    response->set_draining(draining);
    response->set_session_count(sessions_.count());
    response->set_sequence_count(sequences);
    response->set_calls_in_flight(static_cast<uint32_t>(calls_.in_flight_count()) - 1);
    log_.Info(draining ? "draining" : "serving_again",
              {{"sessions", response->session_count()}, {"sequences", sequences}});
    return absl::OkStatus();
  });
}

AdminService::Reactor* AdminService::SelfTest(Context* context, const v1::SelfTestRequest*,
                                              v1::SelfTestResponse* response) {
  return calls_.Unary(context, Rpc::kSelfTest, Access::kAnyone, [=, this](const Call& call) {
    bool passed = true;
    for (const SelfTestCheck& check : RunSelfTest([&call] { return call.Check().ok(); })) {
      v1::SelfTestCheck* message = response->add_checks();
      message->set_name(check.name);
      message->set_passed(check.status.ok());
      message->set_detail(check.status.ok() ? check.detail : std::string(check.status.message()));
      message->set_seconds(check.seconds);
      passed = passed && check.status.ok();
      if (!check.status.ok()) {
        log_.Error("self_test_failed",
                   {{"check", check.name}, {"message", check.status.message()}});
      }
    }
    response->set_passed(passed);
    return absl::OkStatus();
  });
}

}  // namespace pqcached::service

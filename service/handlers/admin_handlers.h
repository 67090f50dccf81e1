// AdminHandlers answers the rpcs of pqcached.v1.Admin, each for the data that its caller may reach
// (Caller::tenant): admin_handlers.cc inspects the sidecar, admin_actions.cc changes its state and
// tests it, and is about sessions and the limits of tenants.
//
// Thread-safe.
#ifndef PQCACHED_SERVICE_HANDLERS_ADMIN_HANDLERS_H_
#define PQCACHED_SERVICE_HANDLERS_ADMIN_HANDLERS_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <utility>

#include "absl/status/status.h"
#include "kvstore/clock.h"
#include "kvstore/store.h"
#include "pqcached/v1/admin.pb.h"
#include "service/config/config.h"
#include "service/handlers/call_gate.h"
#include "service/handlers/caller.h"
#include "service/handlers/rpc_stats.h"
#include "service/session/detached_sessions.h"
#include "service/session/sessions.h"

namespace pqcached::service {

class Log;

// Calls of one tenant at this moment.
struct WorkCounts {
  size_t waiting_calls = 0;  // builds included
  uint32_t running_calls = 0;
  uint32_t running_builds = 0;
};

class AdminHandlers {
 public:
  struct Parts {
    const Config& config;
    const std::string& boot_id;
    kvstore::Store& store;
    Sessions& sessions;
    TenantLimitTable& limits;
    RpcStats& stats;
    CallGate& gate;
    Log& log;
    std::function<void(bool)> set_serving;  // sets the status that the health service reports
    // Ends the connections of the sessions for which the filter is true, and with them the
    // sessions.
    std::function<void(const SessionFilter& filter)> end_sessions;
    std::function<WorkCounts(const std::string& tenant)> count_work;
    DetachedSessions& detached;
  };

  explicit AdminHandlers(Parts parts) : parts_(std::move(parts)) {}

  absl::Status GetServerInfo(const Caller& caller, const v1::GetServerInfoRequest&,
                             v1::GetServerInfoResponse* response);
  absl::Status ListCaches(const Caller& caller, const v1::ListCachesRequest& request,
                          v1::ListCachesResponse* response);
  absl::Status ListSequences(const Caller& caller, const v1::ListSequencesRequest& request,
                             v1::ListSequencesResponse* response);
  absl::Status DescribeSequence(const Caller& caller, const v1::DescribeSequenceRequest& request,
                                v1::DescribeSequenceResponse* response);
  absl::Status Stats(const Caller& caller, const v1::StatsRequest&, v1::StatsResponse* response);
  absl::Status SetLogLevel(const Caller&, const v1::SetLogLevelRequest& request,
                           v1::SetLogLevelResponse* response);
  absl::Status ListLeases(const Caller& caller, const v1::ListLeasesRequest&,
                          v1::ListLeasesResponse* response);
  absl::Status Evict(const Caller& caller, const v1::EvictRequest& request, v1::EvictResponse*);
  absl::Status Pin(const Caller& caller, const v1::PinRequest& request, v1::PinResponse*);
  absl::Status Drain(const Caller&, const v1::DrainRequest& request, v1::DrainResponse* response);
  absl::Status SelfTest(const Caller& caller, const v1::SelfTestRequest&,
                        v1::SelfTestResponse* response);
  absl::Status EraseTenant(const Caller&, const v1::EraseTenantRequest& request,
                           v1::EraseTenantResponse* response);
  absl::Status DropCache(const Caller& caller, const v1::DropCacheRequest& request,
                         v1::DropCacheResponse* response);
  absl::Status ListSessions(const Caller& caller, const v1::ListSessionsRequest&,
                            v1::ListSessionsResponse* response);
  absl::Status EndSession(const Caller& caller, const v1::EndSessionRequest& request,
                          v1::EndSessionResponse* response);
  absl::Status ListTenantLimits(const Caller& caller, const v1::ListTenantLimitsRequest&,
                                v1::ListTenantLimitsResponse* response);
  absl::Status SetTenantLimits(const Caller&, const v1::SetTenantLimitsRequest& request,
                               v1::SetTenantLimitsResponse* response);
  absl::Status ListIndexTypes(const Caller&, const v1::ListIndexTypesRequest&,
                              v1::ListIndexTypesResponse* response);
  absl::Status EndQuarantine(const Caller&, const v1::EndQuarantineRequest& request,
                             v1::EndQuarantineResponse* response);
  absl::Status ExportSequence(const Caller& caller, const v1::ExportSequenceRequest& request,
                              v1::ExportSequenceResponse* response);
  absl::Status ImportSequence(const Caller& caller, const v1::ImportSequenceRequest& request,
                              v1::ImportSequenceResponse* response);

 private:
  uint64_t UptimeSeconds() const;
  kvstore::ImagePlace PlaceOf(const Caller& caller, const std::string& name) const;
  v1::TenantLimitsDescription DescribeLimits(const std::string& tenant) const;

  const Parts parts_;
  std::atomic<bool> self_test_runs_ = false;
  const kvstore::SteadyTime started_ = kvstore::SteadyTime::Now();
};

}  // namespace pqcached::service

#endif  // PQCACHED_SERVICE_HANDLERS_ADMIN_HANDLERS_H_

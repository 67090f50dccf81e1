// AdminService binds the handlers of pqcached.v1.Admin to gRPC.
//
// Thread-safe, as gRPC requires.
#ifndef PQCACHED_SERVICE_RPC_ADMIN_SERVICE_H_
#define PQCACHED_SERVICE_RPC_ADMIN_SERVICE_H_

#include "pqcached/v1/admin.grpc.pb.h"
#include "service/handlers/admin_handlers.h"
#include "service/rpc/calls.h"

namespace pqcached::service {

class AdminService final : public v1::Admin::CallbackService {
 public:
  AdminService(AdminHandlers& handlers, Calls& calls, Entrance entrance)
      : handlers_(handlers), calls_(calls), entrance_(std::move(entrance)) {}

 private:
  static constexpr size_t kMaxAuditedBytes = 256;

  using Context = grpc::CallbackServerContext;
  using Reactor = grpc::ServerUnaryReactor;

  Reactor* GetServerInfo(Context*, const v1::GetServerInfoRequest*,
                         v1::GetServerInfoResponse*) override;
  Reactor* ListCaches(Context*, const v1::ListCachesRequest*, v1::ListCachesResponse*) override;
  Reactor* ListSequences(Context*, const v1::ListSequencesRequest*,
                         v1::ListSequencesResponse*) override;
  Reactor* DescribeSequence(Context*, const v1::DescribeSequenceRequest*,
                            v1::DescribeSequenceResponse*) override;
  Reactor* Stats(Context*, const v1::StatsRequest*, v1::StatsResponse*) override;
  Reactor* SetLogLevel(Context*, const v1::SetLogLevelRequest*, v1::SetLogLevelResponse*) override;
  Reactor* ListLeases(Context*, const v1::ListLeasesRequest*, v1::ListLeasesResponse*) override;
  Reactor* Evict(Context*, const v1::EvictRequest*, v1::EvictResponse*) override;
  Reactor* Pin(Context*, const v1::PinRequest*, v1::PinResponse*) override;
  Reactor* Drain(Context*, const v1::DrainRequest*, v1::DrainResponse*) override;
  Reactor* SelfTest(Context*, const v1::SelfTestRequest*, v1::SelfTestResponse*) override;
  Reactor* EraseTenant(Context*, const v1::EraseTenantRequest*, v1::EraseTenantResponse*) override;

  Reactor* DropCache(Context*, const v1::DropCacheRequest*, v1::DropCacheResponse*) override;
  Reactor* ListSessions(Context*, const v1::ListSessionsRequest*,
                        v1::ListSessionsResponse*) override;
  Reactor* EndSession(Context*, const v1::EndSessionRequest*, v1::EndSessionResponse*) override;
  Reactor* ListTenantLimits(Context*, const v1::ListTenantLimitsRequest*,
                            v1::ListTenantLimitsResponse*) override;
  Reactor* SetTenantLimits(Context*, const v1::SetTenantLimitsRequest*,
                           v1::SetTenantLimitsResponse*) override;
  Reactor* ListIndexTypes(Context*, const v1::ListIndexTypesRequest*,
                          v1::ListIndexTypesResponse*) override;
  Reactor* EndQuarantine(Context*, const v1::EndQuarantineRequest*,
                         v1::EndQuarantineResponse*) override;
  Reactor* ExportSequence(Context*, const v1::ExportSequenceRequest*,
                          v1::ExportSequenceResponse*) override;
  Reactor* ImportSequence(Context*, const v1::ImportSequenceRequest*,
                          v1::ImportSequenceResponse*) override;

  // Runs a method of the handlers as the call `rpc`.
  template <auto kMethod, class Request, class Response>
  Reactor* Answer(Context* context, Rpc rpc, const Request* request, Response* response) {
    return calls_.Unary(
        context, rpc, entrance_,
        [this, request, response](const Call& call) {
          return (handlers_.*kMethod)(call, *request, response);
        },
        RuleOf(rpc).audited ? request->ShortDebugString().substr(0, kMaxAuditedBytes)
                            : std::string());
  }

  AdminHandlers& handlers_;
  Calls& calls_;
  const Entrance entrance_;
};

}  // namespace pqcached::service

#endif  // PQCACHED_SERVICE_RPC_ADMIN_SERVICE_H_

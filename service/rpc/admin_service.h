// AdminService answers the rpcs of pqcached.v1.Admin, which cover all tenants: admin_rpc.cc
// inspects the sidecar, admin_actions_rpc.cc changes its state.
//
// Thread-safe, as gRPC requires.
#ifndef PQCACHED_SERVICE_RPC_ADMIN_SERVICE_H_
#define PQCACHED_SERVICE_RPC_ADMIN_SERVICE_H_

#include <functional>
#include <string>

#include "kvstore/clock.h"
#include "kvstore/store.h"
#include "pqcached/v1/admin.grpc.pb.h"
#include "service/config/config.h"
#include "service/rpc/calls.h"

namespace pqcached::service {

class AdminService final : public v1::Admin::CallbackService {
 public:
  AdminService(const Config& config, std::string boot_id, kvstore::Store& store, Sessions& sessions,
               RpcStats& stats, Calls& calls, Log& log, std::function<void(bool)> set_serving);

 private:
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

  uint64_t UptimeSeconds() const;

  const Config config_;
  const std::string boot_id_;
  const kvstore::SteadyTime started_ = kvstore::SteadyTime::Now();
  kvstore::Store& store_;
  Sessions& sessions_;
  RpcStats& stats_;
  Calls& calls_;
  Log& log_;
  const std::function<void(bool)> set_serving_;  // sets the status that the health service reports
};

}  // namespace pqcached::service

#endif  // PQCACHED_SERVICE_RPC_ADMIN_SERVICE_H_

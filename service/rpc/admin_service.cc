#include "service/rpc/admin_service.h"

namespace pqcached::service {

AdminService::Reactor* AdminService::GetServerInfo(Context* context,
                                                   const v1::GetServerInfoRequest* request,
                                                   v1::GetServerInfoResponse* response) {
  return Answer<&AdminHandlers::GetServerInfo>(context, Rpc::kGetServerInfo, request, response);
}

AdminService::Reactor* AdminService::ListCaches(Context* context,
                                                const v1::ListCachesRequest* request,
                                                v1::ListCachesResponse* response) {
  return Answer<&AdminHandlers::ListCaches>(context, Rpc::kListCaches, request, response);
}

AdminService::Reactor* AdminService::ListSequences(Context* context,
                                                   const v1::ListSequencesRequest* request,
                                                   v1::ListSequencesResponse* response) {
  return Answer<&AdminHandlers::ListSequences>(context, Rpc::kListSequences, request, response);
}

AdminService::Reactor* AdminService::DescribeSequence(Context* context,
                                                      const v1::DescribeSequenceRequest* request,
                                                      v1::DescribeSequenceResponse* response) {
  return Answer<&AdminHandlers::DescribeSequence>(context, Rpc::kDescribeSequence, request,
                                                  response);
}

AdminService::Reactor* AdminService::Stats(Context* context, const v1::StatsRequest* request,
                                           v1::StatsResponse* response) {
  return Answer<&AdminHandlers::Stats>(context, Rpc::kStats, request, response);
}

AdminService::Reactor* AdminService::SetLogLevel(Context* context,
                                                 const v1::SetLogLevelRequest* request,
                                                 v1::SetLogLevelResponse* response) {
  return Answer<&AdminHandlers::SetLogLevel>(context, Rpc::kSetLogLevel, request, response);
}

AdminService::Reactor* AdminService::ListLeases(Context* context,
                                                const v1::ListLeasesRequest* request,
                                                v1::ListLeasesResponse* response) {
  return Answer<&AdminHandlers::ListLeases>(context, Rpc::kListLeases, request, response);
}

AdminService::Reactor* AdminService::Evict(Context* context, const v1::EvictRequest* request,
                                           v1::EvictResponse* response) {
  return Answer<&AdminHandlers::Evict>(context, Rpc::kEvict, request, response);
}

AdminService::Reactor* AdminService::Pin(Context* context, const v1::PinRequest* request,
                                         v1::PinResponse* response) {
  return Answer<&AdminHandlers::Pin>(context, Rpc::kPin, request, response);
}

AdminService::Reactor* AdminService::Drain(Context* context, const v1::DrainRequest* request,
                                           v1::DrainResponse* response) {
  return Answer<&AdminHandlers::Drain>(context, Rpc::kDrain, request, response);
}

AdminService::Reactor* AdminService::SelfTest(Context* context, const v1::SelfTestRequest* request,
                                              v1::SelfTestResponse* response) {
  return Answer<&AdminHandlers::SelfTest>(context, Rpc::kSelfTest, request, response);
}

AdminService::Reactor* AdminService::EraseTenant(Context* context,
                                                 const v1::EraseTenantRequest* request,
                                                 v1::EraseTenantResponse* response) {
  return Answer<&AdminHandlers::EraseTenant>(context, Rpc::kEraseTenant, request, response);
}

AdminService::Reactor* AdminService::DropCache(Context* context,
                                               const v1::DropCacheRequest* request,
                                               v1::DropCacheResponse* response) {
  return Answer<&AdminHandlers::DropCache>(context, Rpc::kDropCache, request, response);
}

AdminService::Reactor* AdminService::ListSessions(Context* context,
                                                  const v1::ListSessionsRequest* request,
                                                  v1::ListSessionsResponse* response) {
  return Answer<&AdminHandlers::ListSessions>(context, Rpc::kListSessions, request, response);
}

AdminService::Reactor* AdminService::EndSession(Context* context,
                                                const v1::EndSessionRequest* request,
                                                v1::EndSessionResponse* response) {
  return Answer<&AdminHandlers::EndSession>(context, Rpc::kEndSession, request, response);
}

AdminService::Reactor* AdminService::ListTenantLimits(Context* context,
                                                      const v1::ListTenantLimitsRequest* request,
                                                      v1::ListTenantLimitsResponse* response) {
  return Answer<&AdminHandlers::ListTenantLimits>(context, Rpc::kListTenantLimits, request,
                                                  response);
}

AdminService::Reactor* AdminService::ListIndexTypes(Context* context,
                                                    const v1::ListIndexTypesRequest* request,
                                                    v1::ListIndexTypesResponse* response) {
  return Answer<&AdminHandlers::ListIndexTypes>(context, Rpc::kListIndexTypes, request, response);
}

AdminService::Reactor* AdminService::SetTenantLimits(Context* context,
                                                     const v1::SetTenantLimitsRequest* request,
                                                     v1::SetTenantLimitsResponse* response) {
  return Answer<&AdminHandlers::SetTenantLimits>(context, Rpc::kSetTenantLimits, request, response);
}

AdminService::Reactor* AdminService::EndQuarantine(Context* context,
                                                   const v1::EndQuarantineRequest* request,
                                                   v1::EndQuarantineResponse* response) {
  return Answer<&AdminHandlers::EndQuarantine>(context, Rpc::kEndQuarantine, request, response);
}

AdminService::Reactor* AdminService::ExportSequence(Context* context,
                                                    const v1::ExportSequenceRequest* request,
                                                    v1::ExportSequenceResponse* response) {
  return Answer<&AdminHandlers::ExportSequence>(context, Rpc::kExportSequence, request, response);
}

AdminService::Reactor* AdminService::ImportSequence(Context* context,
                                                    const v1::ImportSequenceRequest* request,
                                                    v1::ImportSequenceResponse* response) {
  return Answer<&AdminHandlers::ImportSequence>(context, Rpc::kImportSequence, request, response);
}

}  // namespace pqcached::service

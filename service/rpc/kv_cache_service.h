// KvCacheService binds the handlers of pqcached.v1.KvCache to gRPC. The streams are in
// session_rpc.cc, watch_rpc.cc, ingest_rpc.cc and build_rpc.cc.
//
// Thread-safe, as gRPC requires.
#ifndef PQCACHED_SERVICE_RPC_KV_CACHE_SERVICE_H_
#define PQCACHED_SERVICE_RPC_KV_CACHE_SERVICE_H_

#include <memory>
#include <string>

#include "pqcached/v1/kv_cache.grpc.pb.h"
#include "service/config/config.h"
#include "service/handlers/handlers.h"
#include "service/handlers/rpc_stats.h"
#include "service/rpc/calls.h"

namespace pqcached::service {

class SessionStreams;

// Ingest receives its messages as bytes (IngestMessage), and FetchBlocks sends its answer so
// (fetched_rows.h).
class KvCacheService final
    : public v1::KvCache::WithRawCallbackMethod_FetchBlocks<
          v1::KvCache::WithRawCallbackMethod_Ingest<v1::KvCache::CallbackService>> {
 public:
  struct Parts {
    const Config& config;
    const std::string& boot_id;
    Handlers& handlers;
    RpcStats& stats;
    Calls& calls;
    Log& log;
    Entrance entrance = {};
  };

  explicit KvCacheService(const Parts& parts);
  ~KvCacheService() override;

  // Ends all session streams with `status`; their sequences are dropped soon afterwards.
  void EndSessions(const absl::Status& status);
  // Closes the sessions of a tenant, and ends their streams with `status`.
  void EndSessionsIf(const SessionFilter& filter, const absl::Status& status);

 private:
  using Context = grpc::CallbackServerContext;
  using Reactor = grpc::ServerUnaryReactor;

  grpc::ServerBidiReactor<v1::SessionRequest, v1::SessionEvent>* Session(Context* context) override;

  Reactor* OpenCache(Context*, const v1::OpenCacheRequest*, v1::OpenCacheResponse*) override;
  Reactor* CreateSequence(Context*, const v1::CreateSequenceRequest*,
                          v1::CreateSequenceResponse*) override;
  Reactor* DropSequence(Context*, const v1::DropSequenceRequest*,
                        v1::DropSequenceResponse*) override;
  Reactor* TruncateSequence(Context*, const v1::TruncateSequenceRequest*,
                            v1::TruncateSequenceResponse*) override;
  Reactor* ForkSequence(Context*, const v1::ForkSequenceRequest*,
                        v1::ForkSequenceResponse*) override;
  Reactor* ForkSequences(Context*, const v1::ForkSequencesRequest*,
                         v1::ForkSequencesResponse*) override;
  Reactor* SuspendSequence(Context*, const v1::SuspendSequenceRequest*,
                           v1::SuspendSequenceResponse*) override;
  Reactor* ResumeSequence(Context*, const v1::ResumeSequenceRequest*,
                          v1::ResumeSequenceResponse*) override;
  Reactor* MatchPrefix(Context*, const v1::MatchPrefixRequest*, v1::MatchPrefixResponse*) override;
  grpc::ServerWriteReactor<v1::CacheEvents>* WatchEvents(
      Context* context, const v1::WatchEventsRequest* request) override;

  grpc::ServerReadReactor<grpc::ByteBuffer>* Ingest(Context* context,
                                                    grpc::ByteBuffer* response) override;
  Reactor* Commit(Context*, const v1::CommitRequest*, v1::CommitResponse*) override;
  Reactor* Append(Context*, const v1::AppendRequest*, v1::AppendResponse*) override;

  Reactor* ClosePrefill(Context*, const v1::ClosePrefillRequest*,
                        v1::ClosePrefillResponse*) override;
  grpc::ServerWriteReactor<v1::BuildProgress>* BuildIndex(
      Context* context, const v1::BuildIndexRequest* request) override;

  Reactor* TopK(Context*, const v1::TopKRequest*, v1::TopKResponse*) override;
  Reactor* Score(Context*, const v1::ScoreRequest*, v1::ScoreResponse*) override;
  Reactor* FetchBlocks(Context*, const grpc::ByteBuffer*, grpc::ByteBuffer*) override;
  Reactor* FetchTokens(Context*, const v1::FetchTokensRequest*, v1::FetchTokensResponse*) override;
  Reactor* Attend(Context*, const v1::AttendRequest*, v1::AttendResponse*) override;
  Reactor* AttendRange(Context*, const v1::AttendRangeRequest*, v1::AttendRangeResponse*) override;

  Reactor* Attach(Context*, const v1::AttachRequest*, v1::AttachResponse*) override;
  Reactor* Detach(Context*, const v1::DetachRequest*, v1::DetachResponse*) override;
  Reactor* OpenPageCache(Context*, const v1::OpenPageCacheRequest*,
                         v1::OpenPageCacheResponse*) override;
  Reactor* PutPages(Context*, const v1::PutPagesRequest*, v1::PutPagesResponse*) override;
  Reactor* GetPages(Context*, const v1::GetPagesRequest*, v1::GetPagesResponse*) override;
  Reactor* FindPages(Context*, const v1::FindPagesRequest*, v1::FindPagesResponse*) override;
  Reactor* Admit(Context*, const v1::AdmitRequest*, v1::AdmitResponse*) override;

  // Runs a method of `handlers` as the call `rpc`.
  template <auto kMethod, class Group, class Request, class Response>
  Reactor* Answer(Context* context, Rpc rpc, Group& handlers, const Request* request,
                  Response* response) {
    return parts_.calls.Unary(
        context, rpc, parts_.entrance,
        [&handlers, request, response](const Call& call) {
          return (handlers.*kMethod)(call, *request, response);
        },
        /*request=*/{}, [response] { return response->ByteSizeLong(); });
  }

  absl::Status FetchInto(const Call& call, grpc::ByteBuffer received, grpc::ByteBuffer* response);

  const Parts parts_;
  const std::unique_ptr<SessionStreams> streams_;
};

}  // namespace pqcached::service

#endif  // PQCACHED_SERVICE_RPC_KV_CACHE_SERVICE_H_

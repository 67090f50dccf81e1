#include "service/rpc/kv_cache_service.h"

#include <utility>

#include "kernels/base/status_macros.h"
#include "service/base/refusal.h"
#include "service/rpc/fetched_rows.h"
#include "service/rpc/session_rpc.h"
#include "service/wire/wire.h"

namespace pqcached::service {

KvCacheService::KvCacheService(const Parts& parts)
    : parts_(parts), streams_(std::make_unique<SessionStreams>()) {}

KvCacheService::~KvCacheService() = default;

KvCacheService::Reactor* KvCacheService::OpenCache(Context* context,
                                                   const v1::OpenCacheRequest* request,
                                                   v1::OpenCacheResponse* response) {
  return Answer<&SequenceHandlers::OpenCache>(context, Rpc::kOpenCache, parts_.handlers.sequences,
                                              request, response);
}

KvCacheService::Reactor* KvCacheService::CreateSequence(Context* context,
                                                        const v1::CreateSequenceRequest* request,
                                                        v1::CreateSequenceResponse* response) {
  return Answer<&SequenceHandlers::CreateSequence>(context, Rpc::kCreateSequence,
                                                   parts_.handlers.sequences, request, response);
}

KvCacheService::Reactor* KvCacheService::DropSequence(Context* context,
                                                      const v1::DropSequenceRequest* request,
                                                      v1::DropSequenceResponse* response) {
  return Answer<&SequenceHandlers::DropSequence>(context, Rpc::kDropSequence,
                                                 parts_.handlers.sequences, request, response);
}

KvCacheService::Reactor* KvCacheService::TruncateSequence(
    Context* context, const v1::TruncateSequenceRequest* request,
    v1::TruncateSequenceResponse* response) {
  return Answer<&SequenceHandlers::TruncateSequence>(context, Rpc::kTruncateSequence,
                                                     parts_.handlers.sequences, request, response);
}

KvCacheService::Reactor* KvCacheService::ForkSequence(Context* context,
                                                      const v1::ForkSequenceRequest* request,
                                                      v1::ForkSequenceResponse* response) {
  return Answer<&SequenceHandlers::ForkSequence>(context, Rpc::kForkSequence,
                                                 parts_.handlers.sequences, request, response);
}

KvCacheService::Reactor* KvCacheService::ForkSequences(Context* context,
                                                       const v1::ForkSequencesRequest* request,
                                                       v1::ForkSequencesResponse* response) {
  return Answer<&SequenceHandlers::ForkSequences>(context, Rpc::kForkSequences,
                                                  parts_.handlers.sequences, request, response);
}

KvCacheService::Reactor* KvCacheService::SuspendSequence(Context* context,
                                                         const v1::SuspendSequenceRequest* request,
                                                         v1::SuspendSequenceResponse* response) {
  return Answer<&SequenceHandlers::SuspendSequence>(context, Rpc::kSuspendSequence,
                                                    parts_.handlers.sequences, request, response);
}

KvCacheService::Reactor* KvCacheService::ResumeSequence(Context* context,
                                                        const v1::ResumeSequenceRequest* request,
                                                        v1::ResumeSequenceResponse* response) {
  return Answer<&SequenceHandlers::ResumeSequence>(context, Rpc::kResumeSequence,
                                                   parts_.handlers.sequences, request, response);
}

KvCacheService::Reactor* KvCacheService::MatchPrefix(Context* context,
                                                     const v1::MatchPrefixRequest* request,
                                                     v1::MatchPrefixResponse* response) {
  return Answer<&SequenceHandlers::MatchPrefix>(context, Rpc::kMatchPrefix,
                                                parts_.handlers.sequences, request, response);
}

KvCacheService::Reactor* KvCacheService::ClosePrefill(Context* context,
                                                      const v1::ClosePrefillRequest* request,
                                                      v1::ClosePrefillResponse* response) {
  return Answer<&SequenceHandlers::ClosePrefill>(context, Rpc::kClosePrefill,
                                                 parts_.handlers.sequences, request, response);
}

KvCacheService::Reactor* KvCacheService::Admit(Context* context, const v1::AdmitRequest* request,
                                               v1::AdmitResponse* response) {
  return Answer<&SequenceHandlers::Admit>(context, Rpc::kAdmit, parts_.handlers.sequences, request,
                                          response);
}

KvCacheService::Reactor* KvCacheService::Commit(Context* context, const v1::CommitRequest* request,
                                                v1::CommitResponse* response) {
  return Answer<&RowHandlers::Commit>(context, Rpc::kCommit, parts_.handlers.rows, request,
                                      response);
}

KvCacheService::Reactor* KvCacheService::Append(Context* context, const v1::AppendRequest* request,
                                                v1::AppendResponse* response) {
  return Answer<&RowHandlers::Append>(context, Rpc::kAppend, parts_.handlers.rows, request,
                                      response);
}

KvCacheService::Reactor* KvCacheService::TopK(Context* context, const v1::TopKRequest* request,
                                              v1::TopKResponse* response) {
  return Answer<&QueryHandlers::TopK>(context, Rpc::kTopK, parts_.handlers.queries, request,
                                      response);
}

KvCacheService::Reactor* KvCacheService::Score(Context* context, const v1::ScoreRequest* request,
                                               v1::ScoreResponse* response) {
  return Answer<&QueryHandlers::Score>(context, Rpc::kScore, parts_.handlers.queries, request,
                                       response);
}

KvCacheService::Reactor* KvCacheService::FetchBlocks(Context* context,
                                                     const grpc::ByteBuffer* request,
                                                     grpc::ByteBuffer* response) {
  return parts_.calls.Unary(
      context, Rpc::kFetchBlocks, parts_.entrance,
      [this, request, response](const Call& call) { return FetchInto(call, *request, response); },
      /*request=*/{}, [response] { return response->Length(); });
}

absl::Status KvCacheService::FetchInto(const Call& call, grpc::ByteBuffer received,
                                       grpc::ByteBuffer* response) {
  v1::FetchBlocksRequest request;
  if (!grpc::SerializationTraits<v1::FetchBlocksRequest>::Deserialize(&received, &request).ok()) {
    return InvalidArgument("request", "is not a FetchBlocksRequest");
  }
  FetchedBlocks fetched;
  RETURN_IF_ERROR(parts_.handlers.queries.FetchRows(call, request, &fetched));
  grpc::ByteBuffer answer = ToBuffer(std::move(fetched));
  RETURN_IF_ERROR(CheckResponseBytes(answer.Length(), parts_.config.max_message_bytes));
  response->Swap(&answer);
  return absl::OkStatus();
}

KvCacheService::Reactor* KvCacheService::FetchTokens(Context* context,
                                                     const v1::FetchTokensRequest* request,
                                                     v1::FetchTokensResponse* response) {
  return Answer<&QueryHandlers::FetchTokens>(context, Rpc::kFetchTokens, parts_.handlers.queries,
                                             request, response);
}

KvCacheService::Reactor* KvCacheService::Attend(Context* context, const v1::AttendRequest* request,
                                                v1::AttendResponse* response) {
  return Answer<&QueryHandlers::Attend>(context, Rpc::kAttend, parts_.handlers.queries, request,
                                        response);
}

KvCacheService::Reactor* KvCacheService::AttendRange(Context* context,
                                                     const v1::AttendRangeRequest* request,
                                                     v1::AttendRangeResponse* response) {
  return Answer<&QueryHandlers::AttendRange>(context, Rpc::kAttendRange, parts_.handlers.queries,
                                             request, response);
}

KvCacheService::Reactor* KvCacheService::Attach(Context* context, const v1::AttachRequest* request,
                                                v1::AttachResponse* response) {
  return Answer<&LeaseHandlers::Attach>(context, Rpc::kAttach, parts_.handlers.leases, request,
                                        response);
}

KvCacheService::Reactor* KvCacheService::Detach(Context* context, const v1::DetachRequest* request,
                                                v1::DetachResponse* response) {
  return Answer<&LeaseHandlers::Detach>(context, Rpc::kDetach, parts_.handlers.leases, request,
                                        response);
}

KvCacheService::Reactor* KvCacheService::OpenPageCache(Context* context,
                                                       const v1::OpenPageCacheRequest* request,
                                                       v1::OpenPageCacheResponse* response) {
  return Answer<&SequenceHandlers::OpenPageCache>(context, Rpc::kOpenPageCache,
                                                  parts_.handlers.sequences, request, response);
}

KvCacheService::Reactor* KvCacheService::PutPages(Context* context,
                                                  const v1::PutPagesRequest* request,
                                                  v1::PutPagesResponse* response) {
  return Answer<&PageHandlers::PutPages>(context, Rpc::kPutPages, parts_.handlers.pages, request,
                                         response);
}

KvCacheService::Reactor* KvCacheService::GetPages(Context* context,
                                                  const v1::GetPagesRequest* request,
                                                  v1::GetPagesResponse* response) {
  return Answer<&PageHandlers::GetPages>(context, Rpc::kGetPages, parts_.handlers.pages, request,
                                         response);
}

KvCacheService::Reactor* KvCacheService::FindPages(Context* context,
                                                   const v1::FindPagesRequest* request,
                                                   v1::FindPagesResponse* response) {
  return Answer<&PageHandlers::FindPages>(context, Rpc::kFindPages, parts_.handlers.pages, request,
                                          response);
}

}  // namespace pqcached::service

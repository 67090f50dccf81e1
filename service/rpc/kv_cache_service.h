// KvCacheService answers the rpcs of pqcached.v1.KvCache. Their handlers are grouped by subject:
// session_rpc.cc, sequence_rpc.cc, ingest_rpc.cc, local_rpc.cc, build_rpc.cc, query_rpc.cc.
//
// Thread-safe, as gRPC requires.
#ifndef PQCACHED_SERVICE_RPC_KV_CACHE_SERVICE_H_
#define PQCACHED_SERVICE_RPC_KV_CACHE_SERVICE_H_

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/synchronization/mutex.h"
#include "kvstore/store.h"
#include "pqcached/v1/kv_cache.grpc.pb.h"
#include "service/config/config.h"
#include "service/rpc/calls.h"
#include "service/session/detached_sessions.h"

namespace pqcached::service {

class SessionStreams;

// Ingest receives its messages as bytes: see IngestMessage.
class KvCacheService final
    : public v1::KvCache::WithRawCallbackMethod_Ingest<v1::KvCache::CallbackService> {
 public:
  KvCacheService(const Config& config, std::string boot_id, kvstore::Store& store,
                 Sessions& sessions, RpcStats& stats, Calls& calls, Log& log,
                 DetachedSessions& detached);
  ~KvCacheService() override;

  // Ends all session streams with `status`; their sequences are dropped soon afterwards.
  void EndSessions(const absl::Status& status);

 private:
  using Context = grpc::CallbackServerContext;
  using Reactor = grpc::ServerUnaryReactor;
  using SharedSpec = std::shared_ptr<const kvstore::CacheSpec>;

  struct CachedSpec {
    std::string tenant;  // SpecOf returns the entry to this tenant only
    SharedSpec spec;
  };

  // Size of one token of one layer in a response.
  struct TokenShape {
    uint32_t kv_heads = 0;
    uint64_t bytes = 0;  // over all kv heads
  };

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
  Reactor* SuspendSequence(Context*, const v1::SuspendSequenceRequest*,
                           v1::SuspendSequenceResponse*) override;
  Reactor* ResumeSequence(Context*, const v1::ResumeSequenceRequest*,
                          v1::ResumeSequenceResponse*) override;
  Reactor* MatchPrefix(Context*, const v1::MatchPrefixRequest*, v1::MatchPrefixResponse*) override;

  grpc::ServerReadReactor<grpc::ByteBuffer>* Ingest(Context* context,
                                                    grpc::ByteBuffer* response) override;
  Reactor* Commit(Context*, const v1::CommitRequest*, v1::CommitResponse*) override;
  Reactor* Append(Context*, const v1::AppendRequest*, v1::AppendResponse*) override;

  grpc::ServerWriteReactor<v1::BuildProgress>* BuildIndex(
      Context* context, const v1::BuildIndexRequest* request) override;

  Reactor* TopK(Context*, const v1::TopKRequest*, v1::TopKResponse*) override;
  Reactor* Score(Context*, const v1::ScoreRequest*, v1::ScoreResponse*) override;
  Reactor* FetchBlocks(Context*, const v1::FetchBlocksRequest*, v1::FetchBlocksResponse*) override;
  Reactor* FetchTokens(Context*, const v1::FetchTokensRequest*, v1::FetchTokensResponse*) override;
  Reactor* Attend(Context*, const v1::AttendRequest*, v1::AttendResponse*) override;

  Reactor* Attach(Context*, const v1::AttachRequest*, v1::AttachResponse*) override;
  Reactor* Detach(Context*, const v1::DetachRequest*, v1::DetachResponse*) override;
  Reactor* Admit(Context*, const v1::AdmitRequest*, v1::AdmitResponse*) override;

  absl::StatusOr<kvstore::SequenceSpec> SequenceSpecOf(const Call& call,
                                                       const v1::CreateSequenceRequest& request);
  // Drops a sequence that was created for a caller that has disconnected, and returns the error of
  // the call then.
  absl::Status DropIfAbandoned(const Call& call, uint64_t sequence_id);
  absl::Status CommitRows(const Call& call, const v1::CommitRequest& request,
                          v1::CommitResponse* response);
  // Checks that the session holds the lease, when one is given.
  //
  // Errors: kNotFound, kFailedPrecondition  the session does not hold the lease
  absl::Status CheckLease(const Call& call, const v1::LeaseState& lease, const std::string& field);
  // Fills `attachment` with the sequence's segment map, when a lease is given whose known version
  // is older. Always returns OK.
  absl::Status FillAttachment(const Call& call, const v1::LeaseState& lease,
                              v1::Attachment* attachment);
  absl::StatusOr<uint64_t> AppendOne(const Call& call, const v1::SequenceAppend& item,
                                     const std::string& field,
                                     const std::vector<kvstore::LayerRows>& layers);
  // Returns the requested index, or the default of the sequence's cache when the request names
  // none.
  absl::StatusOr<kvstore::IndexDescriptor> IndexOrDefault(const Call& call,
                                                          absl::string_view id_field,
                                                          uint64_t sequence_id, bool present,
                                                          const v1::IndexSpec& spec,
                                                          const std::string& field);
  // Returns the specification of the sequence's cache.
  absl::StatusOr<SharedSpec> SpecOf(const Call& call, uint64_t sequence_id);
  absl::StatusOr<kvstore::Selection> ResolveSelection(const Call& call, uint64_t sequence_id,
                                                      const v1::Selection& selection,
                                                      const std::string& item);
  absl::Status AttendOne(const Call& call, const v1::AttendItem& item, const std::string& field,
                         v1::Attention* message);
  absl::StatusOr<TokenShape> TokenShapeOf(const Call& call, uint64_t sequence_id, uint32_t layer,
                                          kvstore::RowPart part);
  // Checks the size of a response.
  //
  // Errors: kResourceExhausted  the response would not fit in a message
  absl::Status CheckResponseBytes(uint64_t bytes) const;

  const Config config_;
  const std::string boot_id_;
  kvstore::Store& store_;
  Sessions& sessions_;
  RpcStats& stats_;
  Calls& calls_;
  Log& log_;
  DetachedSessions& detached_;
  const std::unique_ptr<SessionStreams> streams_;
  absl::Mutex open_mutex_;  // serializes OpenCache, so that exactly one caller gets `created`
  absl::Mutex mutex_;
  // Cache specifications by sequence id, because a decode step needs one in every layer. Ids are
  // never reused.
  absl::flat_hash_map<uint64_t, CachedSpec> specs_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace pqcached::service

#endif  // PQCACHED_SERVICE_RPC_KV_CACHE_SERVICE_H_

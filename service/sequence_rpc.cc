// Caches and sequences: open, create, drop, truncate; and by name what this version does not have.
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "service/kv_cache_service.h"
#include "service/log.h"
#include "service/wire.h"

namespace pqcached::service {
namespace {

constexpr size_t kMaxFingerprintBytes = 256;  // as OpenCache's

}  // namespace

KvCacheService::Reactor* KvCacheService::OpenCache(Context* context,
                                                   const v1::OpenCacheRequest* request,
                                                   v1::OpenCacheResponse* response) {
  return calls_.Unary(
      context, Rpc::kOpenCache, Access::kSession, [=, this](const Call& call) -> absl::Status {
        const absl::StatusOr<kvstore::CacheSpec> spec = CacheSpecOf(*request);
        if (!spec.ok()) return spec.status();
        const auto is_open = [&](const kvstore::CacheInfo& info) {
          return info.spec.name == spec->name;
        };
        absl::StatusOr<kvstore::CacheInfo> info;
        {
          absl::MutexLock lock(&open_mutex_);
          const std::vector<kvstore::CacheInfo> before = store_.ListCaches(call.session.tenant);
          info = store_.OpenCache(call.session.tenant, *spec);
          response->set_created(std::none_of(before.begin(), before.end(), is_open));
        }
        if (!info.ok()) return info.status();
        response->set_cache_id(info->cache_id);
        response->set_capacity_bytes(info->capacity_bytes);
        if (response->created()) {
          log_.Info("cache_opened", {{"cache_id", info->cache_id},
                                     {"tenant", call.session.tenant},
                                     {"name", spec->name},
                                     {"capacity_bytes", info->capacity_bytes},
                                     {"page_bytes", info->page_bytes}});
        }
        return absl::OkStatus();
      });
}

// A sequence whose id nobody hears would stay: one made for a caller that has gone or whose deadline
// has passed is dropped again, and one made while its session ended.
absl::StatusOr<uint64_t> KvCacheService::CreateOwnedSequence(const Call& call, uint64_t cache_id) {
  const auto created =
      store_.CreateSequence(call.session.tenant, cache_id, {.session = call.session.id});
  if (!created.ok()) return created.status();
  const uint64_t sequence_id = created->sequence_id;
  if (!sessions_.IsOpen(call.token)) {
    store_.DropSession(call.session.id);
    return absl::UnauthenticatedError("metadata pqcached-session: the session has ended");
  }
  if (absl::Status status = call.Check(); !status.ok()) {
    // Not found when the session's end was faster: it is gone either way.
    store_.DropSequence(call.session.tenant, sequence_id).IgnoreError();
    return status;
  }
  return sequence_id;
}

KvCacheService::Reactor* KvCacheService::CreateSequence(Context* context,
                                                        const v1::CreateSequenceRequest* request,
                                                        v1::CreateSequenceResponse* response) {
  return calls_.Unary(
      context, Rpc::kCreateSequence, Access::kSession, [=, this](const Call& call) -> absl::Status {
        if (request->model_fingerprint().size() > kMaxFingerprintBytes) {
          return Invalid("model_fingerprint",
                         absl::StrCat(request->model_fingerprint().size(),
                                      " bytes, must be at most ", kMaxFingerprintBytes));
        }
        if (!request->model_fingerprint().empty()) {
          for (const kvstore::CacheInfo& cache : store_.ListCaches(call.session.tenant)) {
            if (cache.cache_id != request->cache_id()) continue;
            if (cache.spec.model_fingerprint == request->model_fingerprint()) continue;
            return absl::FailedPreconditionError(
                absl::StrCat("model_fingerprint: '", request->model_fingerprint(),
                             "', must be the cache's, '", cache.spec.model_fingerprint, "'"));
          }
        }
        const absl::StatusOr<uint64_t> sequence_id = CreateOwnedSequence(call, request->cache_id());
        if (!sequence_id.ok()) return NamingId("cache_id", sequence_id.status());
        response->set_sequence_id(*sequence_id);
        return absl::OkStatus();
      });
}

KvCacheService::Reactor* KvCacheService::DropSequence(Context* context,
                                                      const v1::DropSequenceRequest* request,
                                                      v1::DropSequenceResponse*) {
  return calls_.Unary(context, Rpc::kDropSequence, Access::kSession, [=, this](const Call& call) {
    const absl::Status status = store_.DropSequence(call.session.tenant, request->sequence_id());
    if (status.ok()) {
      absl::MutexLock lock(&mutex_);
      specs_.erase(request->sequence_id());
    }
    return NamingId("sequence_id", status);
  });
}

KvCacheService::Reactor* KvCacheService::TruncateSequence(
    Context* context, const v1::TruncateSequenceRequest* request,
    v1::TruncateSequenceResponse* response) {
  return calls_.Unary(context, Rpc::kTruncateSequence, Access::kSession,
                      [=, this](const Call& call) {
                        const absl::StatusOr<uint64_t> token_count = store_.TruncateSequence(
                            call.session.tenant, request->sequence_id(), request->token_count());
                        if (token_count.ok()) response->set_token_count(*token_count);
                        return NamingId("sequence_id", token_count.status());
                      });
}

KvCacheService::Reactor* KvCacheService::ForkSequence(Context* context,
                                                      const v1::ForkSequenceRequest*,
                                                      v1::ForkSequenceResponse*) {
  return calls_.Unimplemented(context, Rpc::kForkSequence);
}

KvCacheService::Reactor* KvCacheService::SuspendSequence(Context* context,
                                                         const v1::SuspendSequenceRequest*,
                                                         v1::SuspendSequenceResponse*) {
  return calls_.Unimplemented(context, Rpc::kSuspendSequence);
}

KvCacheService::Reactor* KvCacheService::ResumeSequence(Context* context,
                                                        const v1::ResumeSequenceRequest*,
                                                        v1::ResumeSequenceResponse*) {
  return calls_.Unimplemented(context, Rpc::kResumeSequence);
}

KvCacheService::Reactor* KvCacheService::MatchPrefix(Context* context,
                                                     const v1::MatchPrefixRequest*,
                                                     v1::MatchPrefixResponse*) {
  return calls_.Unimplemented(context, Rpc::kMatchPrefix);
}

KvCacheService::Reactor* KvCacheService::Commit(Context* context, const v1::CommitRequest*,
                                                v1::CommitResponse*) {
  return calls_.Unimplemented(context, Rpc::kCommit);
}

KvCacheService::Reactor* KvCacheService::Attach(Context* context, const v1::AttachRequest*,
                                                v1::AttachResponse*) {
  return calls_.Unimplemented(context, Rpc::kAttach);
}

KvCacheService::Reactor* KvCacheService::Detach(Context* context, const v1::DetachRequest*,
                                                v1::DetachResponse*) {
  return calls_.Unimplemented(context, Rpc::kDetach);
}

KvCacheService::Reactor* KvCacheService::Admit(Context* context, const v1::AdmitRequest*,
                                               v1::AdmitResponse*) {
  return calls_.Unimplemented(context, Rpc::kAdmit);
}

}  // namespace pqcached::service

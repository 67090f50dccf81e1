// RPCs for caches and sequences: open, create, fork, roll back, suspend and drop; prefixes;
// admission.
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "service/base/log.h"
#include "service/base/refusal.h"
#include "service/rpc/kv_cache_service.h"
#include "service/wire/wire.h"

namespace pqcached::service {
namespace {

constexpr size_t kMaxFingerprintBytes = 256;  // the limit of OpenCache
constexpr size_t kMaxExtraKeyBytes = 256;

absl::Status CheckExtraKey(const std::string& key) {
  if (key.size() <= kMaxExtraKeyBytes) return absl::OkStatus();
  return InvalidArgument("extra_key",
                         absl::StrCat(key.size(), " bytes, must be at most ", kMaxExtraKeyBytes));
}

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

// A sequence whose id does not reach its caller would never be dropped. Therefore a sequence that
// was created for a cancelled call, past its deadline, or during the end of its session is dropped
// again.
absl::Status KvCacheService::DropIfAbandoned(const Call& call, uint64_t sequence_id) {
  if (!sessions_.IsOpen(call.token)) {
    store_.DropSession(call.session.id);
    return Unauthenticated("pqcached-session", "the session has ended");
  }
  absl::Status status = call.Check();
  if (!status.ok()) {
    // kNotFound means that the end of the session has already dropped the sequence.
    store_.DropSequence(call.session.tenant, sequence_id).IgnoreError();
  }
  return status;
}

absl::StatusOr<kvstore::SequenceSpec> KvCacheService::SequenceSpecOf(
    const Call& call, const v1::CreateSequenceRequest& request) {
  kvstore::SequenceSpec spec{.session = call.session.id,
                             .token_ids = {request.token_ids().begin(), request.token_ids().end()},
                             .extra_key = request.extra_key(),
                             .live_index = std::nullopt,
                             .group_key = request.group_key()};
  if (absl::Status status = CheckExtraKey(request.extra_key()); !status.ok()) return status;
  if (!request.has_live_index()) return spec;
  absl::StatusOr<kvstore::LiveIndex> live = LiveIndexOf(request.live_index(), "live_index");
  if (!live.ok()) return live.status();
  spec.live_index = *std::move(live);
  return spec;
}

KvCacheService::Reactor* KvCacheService::CreateSequence(Context* context,
                                                        const v1::CreateSequenceRequest* request,
                                                        v1::CreateSequenceResponse* response) {
  return calls_.Unary(
      context, Rpc::kCreateSequence, Access::kSession, [=, this](const Call& call) -> absl::Status {
        if (request->model_fingerprint().size() > kMaxFingerprintBytes) {
          return InvalidArgument("model_fingerprint",
                                 absl::StrCat(request->model_fingerprint().size(),
                                              " bytes, must be at most ", kMaxFingerprintBytes));
        }
        if (!request->model_fingerprint().empty()) {
          for (const kvstore::CacheInfo& cache : store_.ListCaches(call.session.tenant)) {
            if (cache.cache_id != request->cache_id()) continue;
            if (cache.spec.model_fingerprint == request->model_fingerprint()) continue;
            return FailedPrecondition(
                "model_fingerprint",
                absl::StrCat("'", request->model_fingerprint(), "', must be the cache's, '",
                             cache.spec.model_fingerprint, "'"));
          }
        }
        const absl::StatusOr<kvstore::SequenceSpec> spec = SequenceSpecOf(call, *request);
        if (!spec.ok()) return spec.status();
        const auto created = store_.CreateSequence(call.session.tenant, request->cache_id(), *spec);
        if (!created.ok()) return created.status();
        response->set_sequence_id(created->sequence_id);
        response->set_token_count(created->token_count);
        return DropIfAbandoned(call, created->sequence_id);
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
    return status;
  });
}

KvCacheService::Reactor* KvCacheService::TruncateSequence(
    Context* context, const v1::TruncateSequenceRequest* request,
    v1::TruncateSequenceResponse* response) {
  return calls_.Unary(
      context, Rpc::kTruncateSequence, Access::kSession,
      [=, this](const Call& call) -> absl::Status {
        // The lease is checked first, because truncation may spare only the caller's own lease.
        if (absl::Status status = CheckLease(call, request->lease(), "lease"); !status.ok()) {
          return status;
        }
        const absl::StatusOr<uint64_t> token_count =
            store_.TruncateSequence(call.session.tenant, request->sequence_id(),
                                    request->token_count(), request->lease().lease_id());
        if (!token_count.ok()) return token_count.status();
        response->set_token_count(*token_count);
        return FillAttachment(call, request->lease(), response->mutable_attachment());
      });
}

KvCacheService::Reactor* KvCacheService::ForkSequence(Context* context,
                                                      const v1::ForkSequenceRequest* request,
                                                      v1::ForkSequenceResponse* response) {
  return calls_.Unary(
      context, Rpc::kForkSequence, Access::kSession, [=, this](const Call& call) -> absl::Status {
        const auto forked = store_.ForkSequence(call.session.tenant, request->sequence_id(),
                                                request->token_count(), call.session.id);
        if (!forked.ok()) return forked.status();
        response->set_sequence_id(forked->sequence_id);
        response->set_token_count(forked->token_count);
        return DropIfAbandoned(call, forked->sequence_id);
      });
}

KvCacheService::Reactor* KvCacheService::SuspendSequence(Context* context,
                                                         const v1::SuspendSequenceRequest* request,
                                                         v1::SuspendSequenceResponse*) {
  return calls_.Unary(
      context, Rpc::kSuspendSequence, Access::kSession, [=, this](const Call& call) {
        return store_.SuspendSequence(call.session.tenant, request->sequence_id()).status();
      });
}

KvCacheService::Reactor* KvCacheService::ResumeSequence(Context* context,
                                                        const v1::ResumeSequenceRequest* request,
                                                        v1::ResumeSequenceResponse* response) {
  return calls_.Unary(context, Rpc::kResumeSequence, Access::kSession, [=, this](const Call& call) {
    const absl::StatusOr<uint64_t> token_count =
        store_.ResumeSequence(call.session.tenant, request->sequence_id());
    if (token_count.ok()) response->set_token_count(*token_count);
    return token_count.status();
  });
}

KvCacheService::Reactor* KvCacheService::MatchPrefix(Context* context,
                                                     const v1::MatchPrefixRequest* request,
                                                     v1::MatchPrefixResponse* response) {
  return calls_.Unary(
      context, Rpc::kMatchPrefix, Access::kSession, [=, this](const Call& call) -> absl::Status {
        if (absl::Status status = CheckExtraKey(request->extra_key()); !status.ok()) return status;
        const absl::StatusOr<uint64_t> token_count = store_.MatchPrefix(
            call.session.tenant, request->cache_id(),
            {request->token_ids().data(), static_cast<size_t>(request->token_ids_size())},
            request->extra_key());
        if (!token_count.ok()) return token_count.status();
        response->set_token_count(*token_count);
        return absl::OkStatus();
      });
}

KvCacheService::Reactor* KvCacheService::Admit(Context* context, const v1::AdmitRequest* request,
                                               v1::AdmitResponse* response) {
  return calls_.Unary(
      context, Rpc::kAdmit, Access::kSession, [=, this](const Call& call) -> absl::Status {
        const absl::StatusOr<kvstore::AdmitSpec> spec = AdmitSpecOf(*request);
        if (!spec.ok()) return spec.status();
        const auto admission = store_.Admit(call.session.tenant, request->cache_id(), *spec);
        if (!admission.ok()) return admission.status();
        ToWire(*admission, response);
        return absl::OkStatus();
      });
}

}  // namespace pqcached::service

#include "service/handlers/sequence_handlers.h"

#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/base/status_macros.h"
#include "service/base/log.h"
#include "service/base/refusal.h"
#include "service/session/text.h"
#include "service/wire/token_names.h"
#include "service/wire/wire.h"

namespace pqcached::service {
namespace {

constexpr size_t kMaxExtraKeyBytes = 256;
constexpr size_t kMaxEventsOfMessage = 256;

std::string BytesOf(const kvstore::PrefixKey& key) { return {key.begin(), key.end()}; }

void ToWire(const kvstore::CacheEvent& event, v1::CacheEvent* message) {
  message->set_kind(static_cast<v1::CacheEventKind>(event.kind));
  message->set_number(event.number);
  if (event.kind == kvstore::CacheEventKind::kCleared) return;
  message->set_key(BytesOf(event.step.key));
  message->set_parent_key(BytesOf(event.step.parent));
  message->set_token_end(event.step.token_end);
}
static_assert(static_cast<int>(kvstore::CacheEventKind::kStored) == v1::CACHE_EVENT_KIND_STORED &&
              static_cast<int>(kvstore::CacheEventKind::kRemoved) == v1::CACHE_EVENT_KIND_REMOVED &&
              static_cast<int>(kvstore::CacheEventKind::kCleared) == v1::CACHE_EVENT_KIND_CLEARED);

static_assert(static_cast<int>(kvstore::Retention::kAlways) == v1::RETENTION_ALWAYS &&
              static_cast<int>(kvstore::Retention::kNever) == v1::RETENTION_NEVER);

absl::Status CheckExtraKey(const std::string& key) {
  if (key.size() <= kMaxExtraKeyBytes) return absl::OkStatus();
  return InvalidArgument("extra_key",
                         absl::StrCat(key.size(), " bytes, must be at most ", kMaxExtraKeyBytes));
}

absl::StatusOr<kvstore::SequenceSpec> SequenceSpecOf(const Caller& caller,
                                                     const v1::CreateSequenceRequest& request) {
  kvstore::SequenceSpec spec{.session = caller.session.id,
                             .token_ids = {request.token_ids().begin(), request.token_ids().end()},
                             .content_keys = {},
                             .extra_key = request.extra_key(),
                             .live_index = std::nullopt,
                             .group_key = request.group_key()};
  RETURN_IF_ERROR(CheckExtraKey(request.extra_key()));
  ASSIGN_OR_RETURN(spec.content_keys, ContentKeysOf(request.content_keys()));
  if (request.retention() < 0 || request.retention() > v1::RETENTION_NEVER) {
    return InvalidArgument(
        "retention", absl::StrCat(static_cast<int>(request.retention()), ", must be a Retention"));
  }
  spec.retention = static_cast<kvstore::Retention>(request.retention());
  if (!request.has_live_index()) return spec;
  ASSIGN_OR_RETURN(const kvstore::LiveIndex live, LiveIndexOf(request.live_index(), "live_index"));
  spec.live_index = live;
  return spec;
}

}  // namespace

absl::Status SequenceHandlers::OpenCache(const Caller& caller, const v1::OpenCacheRequest& request,
                                         v1::OpenCacheResponse* response) {
  ASSIGN_OR_RETURN(const kvstore::CacheSpec spec, CacheSpecOf(request));
  ASSIGN_OR_RETURN(const kvstore::OpenedCache opened,
                   store_.OpenCache(caller.session.tenant, spec, caller.session.id));
  response->set_created(opened.is_new);
  response->set_cache_id(opened.cache_id);
  response->set_capacity_bytes(opened.capacity_bytes);
  return FinishOpen(caller, opened);
}

absl::Status SequenceHandlers::OpenPageCache(const Caller& caller,
                                             const v1::OpenPageCacheRequest& request,
                                             v1::OpenPageCacheResponse* response) {
  RETURN_IF_ERROR(CheckText("name", request.name(), kvstore::kMaxNameBytes));
  ASSIGN_OR_RETURN(const kvstore::OpenedCache opened,
                   store_.OpenPageCache(caller.session.tenant,
                                        {.name = request.name(),
                                         .capacity_bytes = request.capacity_bytes(),
                                         .quota_bytes = request.quota_bytes()},
                                        caller.session.id));
  response->set_created(opened.is_new);
  response->set_cache_id(opened.cache_id);
  response->set_capacity_bytes(opened.capacity_bytes);
  return FinishOpen(caller, opened);
}

absl::Status SequenceHandlers::FinishOpen(const Caller& caller,
                                          const kvstore::OpenedCache& opened) {
  if (opened.is_new) {
    log_.Info("cache_opened", {{"cache_id", opened.cache_id},
                               {"tenant", caller.session.tenant},
                               {"name", opened.spec.name},
                               {"capacity_bytes", opened.capacity_bytes},
                               {"page_bytes", opened.page_bytes}});
  }
  return DropIfEnded(caller);
}

// The end of the session, which drops what it has in the store, may have come before this call.
absl::Status SequenceHandlers::DropIfEnded(const Caller& caller) {
  if (sessions_.IsOpen(caller.token)) return absl::OkStatus();
  store_.DropSession(caller.session.id);
  return Unauthenticated("pqcached-session", "the session has ended");
}

// A sequence whose id does not reach its caller would never be dropped. Therefore a sequence that
// was created for a cancelled call, past its deadline, or during the end of its session is dropped
// again.
absl::Status SequenceHandlers::DropIfAbandoned(const Caller& caller, uint64_t sequence_id) {
  RETURN_IF_ERROR(DropIfEnded(caller));
  absl::Status status = caller.Check();
  if (!status.ok()) {
    // kNotFound means that the end of the session has already dropped the sequence.
    store_.DropSequence(caller.session.tenant, sequence_id).IgnoreError();
  }
  return status;
}

absl::Status SequenceHandlers::CheckFingerprint(const Caller& caller,
                                                const v1::CreateSequenceRequest& request) {
  const std::string& fingerprint = request.model_fingerprint();
  RETURN_IF_ERROR(CheckText("model_fingerprint", fingerprint, kvstore::kMaxFingerprintBytes));
  if (fingerprint.empty()) return absl::OkStatus();
  for (const kvstore::CacheInfo& cache : store_.ListCaches(caller.session.tenant)) {
    if (cache.cache_id != request.cache_id()) continue;
    if (cache.spec.model_fingerprint == fingerprint) continue;
    return FailedPrecondition("model_fingerprint",
                              absl::StrCat("'", fingerprint, "', must be the cache's, '",
                                           cache.spec.model_fingerprint, "'"));
  }
  return absl::OkStatus();
}

absl::Status SequenceHandlers::CreateSequence(const Caller& caller,
                                              const v1::CreateSequenceRequest& request,
                                              v1::CreateSequenceResponse* response) {
  RETURN_IF_ERROR(CheckFingerprint(caller, request));
  ASSIGN_OR_RETURN(const kvstore::SequenceSpec spec, SequenceSpecOf(caller, request));
  ASSIGN_OR_RETURN(const auto created,
                   store_.CreateSequence(caller.session.tenant, request.cache_id(), spec));
  response->set_sequence_id(created.sequence_id);
  response->set_token_count(created.token_count);
  return DropIfAbandoned(caller, created.sequence_id);
}

absl::Status SequenceHandlers::DropSequence(const Caller& caller,
                                            const v1::DropSequenceRequest& request,
                                            v1::DropSequenceResponse*) {
  absl::Status status = store_.DropSequence(caller.session.tenant, request.sequence_id());
  if (status.ok()) specs_.Forget(request.sequence_id());
  return status;
}

absl::Status SequenceHandlers::TruncateSequence(const Caller& caller,
                                                const v1::TruncateSequenceRequest& request,
                                                v1::TruncateSequenceResponse* response) {
  // The lease is checked first, because truncation may spare only the caller's own lease.
  RETURN_IF_ERROR(leases_.Check(caller, request.lease(), "lease"));
  ASSIGN_OR_RETURN(const uint64_t token_count,
                   store_.TruncateSequence(caller.session.tenant, request.sequence_id(),
                                           request.token_count(), request.lease().lease_id()));
  response->set_token_count(token_count);
  leases_.Fill(caller, request.lease(), response->mutable_attachment());
  return absl::OkStatus();
}

absl::Status SequenceHandlers::ForkSequence(const Caller& caller,
                                            const v1::ForkSequenceRequest& request,
                                            v1::ForkSequenceResponse* response) {
  ASSIGN_OR_RETURN(const auto forked,
                   store_.ForkSequence(caller.session.tenant, request.sequence_id(),
                                       request.token_count(), caller.session.id));
  response->set_sequence_id(forked.sequence_id);
  response->set_token_count(forked.token_count);
  return DropIfAbandoned(caller, forked.sequence_id);
}

absl::Status SequenceHandlers::ForkSequences(const Caller& caller,
                                             const v1::ForkSequencesRequest& request,
                                             v1::ForkSequencesResponse* response) {
  constexpr int kMaxItems = 256;
  if (request.items_size() > kMaxItems) {
    return InvalidArgument("items",
                           absl::StrCat(request.items_size(), ", must be at most ", kMaxItems));
  }
  if (request.dropped_sequence_ids_size() > kMaxItems) {
    return InvalidArgument("dropped_sequence_ids", absl::StrCat(request.dropped_sequence_ids_size(),
                                                                ", must be at most ", kMaxItems));
  }
  for (int i = 0; i < request.items_size(); ++i) {
    const absl::Status forked = ForkSequence(caller, request.items(i), response->add_items());
    if (forked.ok()) continue;
    for (int created = 0; created < i; ++created) {
      store_.DropSequence(caller.session.tenant, response->items(created).sequence_id())
          .IgnoreError();  // it may be dropped with its session
    }
    response->Clear();
    return kvstore::PrefixField(absl::StrCat("items[", i, "]"), forked);
  }
  for (const uint64_t id : request.dropped_sequence_ids()) {
    if (store_.DropSequence(caller.session.tenant, id).ok()) specs_.Forget(id);
  }
  return absl::OkStatus();
}

absl::Status SequenceHandlers::SuspendSequence(const Caller& caller,
                                               const v1::SuspendSequenceRequest& request,
                                               v1::SuspendSequenceResponse*) {
  return store_.SuspendSequence(caller.session.tenant, request.sequence_id()).status();
}

absl::Status SequenceHandlers::ResumeSequence(const Caller& caller,
                                              const v1::ResumeSequenceRequest& request,
                                              v1::ResumeSequenceResponse* response) {
  const absl::StatusOr<uint64_t> token_count =
      store_.ResumeSequence(caller.session.tenant, request.sequence_id());
  if (token_count.ok()) response->set_token_count(*token_count);
  return token_count.status();
}

absl::Status SequenceHandlers::ClosePrefill(const Caller& caller,
                                            const v1::ClosePrefillRequest& request,
                                            v1::ClosePrefillResponse*) {
  RETURN_IF_ERROR(caller.Check());
  return store_.ClosePrefill(caller.session.tenant, request.sequence_id());
}

absl::Status SequenceHandlers::MatchPrefix(const Caller& caller,
                                           const v1::MatchPrefixRequest& request,
                                           v1::MatchPrefixResponse* response) {
  RETURN_IF_ERROR(CheckExtraKey(request.extra_key()));
  ASSIGN_OR_RETURN(const auto content_keys, ContentKeysOf(request.content_keys()));
  const std::span<const uint32_t> token_ids(request.token_ids().data(),
                                            static_cast<size_t>(request.token_ids_size()));
  ASSIGN_OR_RETURN(const uint64_t token_count,
                   store_.MatchPrefix(caller.session.tenant, request.cache_id(),
                                      {token_ids, content_keys}, request.extra_key()));
  response->set_token_count(token_count);
  if (!request.want_keys()) return absl::OkStatus();
  ASSIGN_OR_RETURN(const auto keys,
                   store_.PrefixKeys(caller.session.tenant, request.cache_id(),
                                     {token_ids, content_keys}, request.extra_key()));
  response->set_root(BytesOf(keys.front()));
  for (size_t i = 1; i < keys.size(); ++i) response->add_keys(BytesOf(keys[i]));
  return absl::OkStatus();
}

absl::StatusOr<EventWatch> SequenceHandlers::BeginWatch(const Caller& caller,
                                                        const v1::WatchEventsRequest& request) {
  EventWatch watch{.cache_id = request.cache_id(),
                   .position = {.epoch = request.epoch(), .number = request.number()}};
  RETURN_IF_ERROR(store_.HasEvents(caller.session.tenant, watch.cache_id, watch.position).status());
  ASSIGN_OR_RETURN(watch.seat, event_seats_.Acquire(caller.session.tenant));
  for (const kvstore::CacheInfo& cache : store_.ListCaches(caller.session.tenant)) {
    if (cache.cache_id == watch.cache_id) watch.cache = cache.spec.name;
  }
  return watch;
}

bool SequenceHandlers::HasEvents(const Caller& caller, const EventWatch& watch) const {
  const auto has_events = store_.HasEvents(caller.session.tenant, watch.cache_id, watch.position);
  return !has_events.ok() || *has_events;
}

absl::Status SequenceHandlers::ReadEvents(const Caller& caller, EventWatch& watch,
                                          v1::CacheEvents* batch) {
  batch->Clear();
  batch->set_tenant(caller.session.tenant);
  batch->set_cache(watch.cache);
  batch->set_cache_id(watch.cache_id);
  const auto events =
      store_.ReadEvents(caller.session.tenant, watch.cache_id, watch.position, kMaxEventsOfMessage);
  batch->set_epoch(watch.position.epoch);
  if (!events.ok()) {
    if (watch.is_dropped) return events.status();
    watch.is_dropped = true;
    ToWire(kvstore::CacheEvent{}, batch->add_events());
    return absl::OkStatus();
  }
  for (const kvstore::CacheEvent& event : *events) ToWire(event, batch->add_events());
  return absl::OkStatus();
}

absl::Status SequenceHandlers::Admit(const Caller& caller, const v1::AdmitRequest& request,
                                     v1::AdmitResponse* response) {
  ASSIGN_OR_RETURN(const kvstore::AdmitSpec spec, AdmitSpecOf(request));
  ASSIGN_OR_RETURN(const auto admission, store_.Admit(caller.tenant(), request.cache_id(), spec));
  ToWire(admission, response);
  return absl::OkStatus();
}

}  // namespace pqcached::service

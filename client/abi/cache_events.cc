// Implements pqc_cache_events_* and pqc_prefix_keys.
#include "pqcached/cache_events.h"

#include <memory>

#include "client/base/arguments.h"
#include "client/base/call_log.h"
#include "client/base/error.h"
#include "client/step/handles.h"
#include "kernels/base/status_macros.h"

struct pqc_cache_events {
  std::shared_ptr<const pqcached::client::CacheState> cache;
  uint64_t watch_id = 0;
};

namespace pqcached::client {
namespace {

constexpr uint32_t kEventsVersion = 12;  // of Remote

pqc_status GetRemoteWithEvents(const ClientState& client, Remote** remote) {
  RETURN_IF_ERROR(FindRemote(client, remote));
  if (client.remote_version >= kEventsVersion) return PQC_OK;
  return Fail(PQC_UNIMPLEMENTED, "", "libpqcached_rpc is older, and has no events");
}

pqc_status OpenEvents(pqc_cache* cache, uint64_t epoch, uint64_t number,
                      pqc_cache_events** events) {
  if (!events) return Fail(PQC_INVALID_ARGUMENT, "events", "must not be NULL");
  *events = nullptr;
  if (!cache) return Fail(PQC_INVALID_ARGUMENT, "cache", "must not be NULL");
  Remote* remote = nullptr;
  RETURN_IF_ERROR(GetRemoteWithEvents(*cache->state->client, &remote));
  auto opened = std::make_unique<pqc_cache_events>();
  opened->cache = cache->state;
  RefusalBuffer error;
  const pqc_status status =
      remote->WatchEvents(cache->state->cache_id, epoch, number, &opened->watch_id, &error);
  if (status != PQC_OK) return Report(status, error, {{"cache_id", "cache"}});
  *events = opened.release();
  return PQC_OK;
}

pqc_status NextEvents(pqc_cache_events* events, uint32_t timeout_ms, pqc_cache_event* out,
                      uint32_t capacity, uint32_t* count) {
  if (!events) return Fail(PQC_INVALID_ARGUMENT, "events", "must not be NULL");
  if (!out) return Fail(PQC_INVALID_ARGUMENT, "out", "must not be NULL");
  if (!count) return Fail(PQC_INVALID_ARGUMENT, "count", "must not be NULL");
  *count = 0;
  if (capacity < 1) return Fail(PQC_INVALID_ARGUMENT, "capacity", "0, must be at least 1");
  Remote* remote = nullptr;
  RETURN_IF_ERROR(GetRemoteWithEvents(*events->cache->client, &remote));
  RefusalBuffer error;
  return Report(remote->NextEvents(events->watch_id, timeout_ms, out, capacity, count, &error),
                error, {{"cache_id", "events"}});
}

void CloseEvents(pqc_cache_events* events) {
  if (!events) return;
  Remote* const remote = events->cache->client->remote.get();
  if (remote) remote->EndWatch(events->watch_id);
  delete events;
}

pqc_status PrefixKeys(pqc_cache* cache, const pqc_sequence_options* caller_prompt,
                      pqc_prefix_key* root, pqc_prefix_key* keys, uint64_t capacity,
                      uint64_t* count) {
  if (!cache) return Fail(PQC_INVALID_ARGUMENT, "cache", "must not be NULL");
  if (!count) return Fail(PQC_INVALID_ARGUMENT, "count", "must not be NULL");
  *count = 0;
  if (!keys && capacity > 0) return Fail(PQC_INVALID_ARGUMENT, "keys", "must not be NULL");
  pqc_sequence_options prompt;
  RETURN_IF_ERROR(ReadPrompt(caller_prompt, &prompt));
  Remote* remote = nullptr;
  RETURN_IF_ERROR(GetRemoteWithEvents(*cache->state->client, &remote));
  pqc_prefix_key ignored;
  RefusalBuffer error;
  return Report(remote->PrefixKeys(cache->state->cache_id, prompt, root ? root : &ignored, keys,
                                   capacity, count, &error),
                error,
                {{"cache_id", "cache"},
                 {"token_ids", "prompt.token_ids"},
                 {"content_keys", "prompt.content_keys"},
                 {"extra_key", "prompt.extra_key"}});
}

}  // namespace
}  // namespace pqcached::client

extern "C" {

pqc_status pqc_cache_events_open(pqc_cache* cache, uint64_t epoch, uint64_t number,
                                 pqc_cache_events** events) {
  return pqcached::client::RecordedCall(
      "pqc_cache_events_open",
      [&](pqcached::client::CallRecord& call) {
        call.Handle("cache", cache).Opens("events", events);
      },
      [&] { return pqcached::client::OpenEvents(cache, epoch, number, events); });
}

pqc_status pqc_cache_events_next(pqc_cache_events* events, uint32_t timeout_ms,
                                 pqc_cache_event* out, uint32_t capacity, uint32_t* count) {
  return pqcached::client::RecordedCall(
      "pqc_cache_events_next",
      [&](pqcached::client::CallRecord& call) {
        call.Handle("events", events).Number("timeout_ms", timeout_ms);
      },
      [&] { return pqcached::client::NextEvents(events, timeout_ms, out, capacity, count); });
}

void pqc_cache_events_close(pqc_cache_events* events) {
  pqcached::client::RecordedClose("pqc_cache_events_close", "events", events,
                                  [&] { pqcached::client::CloseEvents(events); });
}

pqc_status pqc_prefix_keys(pqc_cache* cache, const pqc_sequence_options* prompt,
                           pqc_prefix_key* root, pqc_prefix_key* keys, uint64_t capacity,
                           uint64_t* count) {
  return pqcached::client::RecordedCall(
      "pqc_prefix_keys",
      [&](pqcached::client::CallRecord& call) {
        call.Handle("cache", cache).Number("capacity", capacity);
      },
      [&] { return pqcached::client::PrefixKeys(cache, prompt, root, keys, capacity, count); });
}

}  // extern "C"

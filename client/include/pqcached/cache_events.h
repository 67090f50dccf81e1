/* pqcached client: events of a cache, for routers that send requests to the host with the longest
 * stored prefix. The conventions of client.h hold.
 *
 * A router reads the events of each sidecar's cache, and keeps the keys that are present. It
 * computes the keys of a prompt once; the host that has the most of them, from the first on, has
 * the longest prefix.
 *
 * Example, which keeps a table of keys up to date until a call fails:
 *
 *     pqc_cache_event events[256];
 *     uint32_t count = 0;
 *     pqc_cache_events* stream = NULL;
 *     pqc_status status = pqc_cache_events_open(cache, 0, 0, &stream);
 *     while (status == PQC_OK) {
 *       status = pqc_cache_events_next(stream, 1000, events, 256, &count);
 *       for (uint32_t i = 0; status == PQC_OK && i < count; ++i) {
 *         if (events[i].kind == PQC_CACHE_CLEARED) forget_all_keys();
 *         if (events[i].kind == PQC_CACHE_STORED) add_key(events[i].key);
 *         if (events[i].kind == PQC_CACHE_REMOVED) remove_key(events[i].key);
 *       }
 *     }
 *     pqc_cache_events_close(stream);
 */
#ifndef PQCACHED_CACHE_EVENTS_H_
#define PQCACHED_CACHE_EVENTS_H_

#include "pqcached/client.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Key of 128 tokens and of all tokens before them. The key of a step of 128 tokens is the SHA-256
 * of the key before it and of the names of the step's tokens: their ids of 4 bytes each, least
 * significant byte first, or their content key. The key before the first one is the root of the
 * chain, which depends on the tenant, the model, the shape of the cache, and extra_key. */
typedef struct pqc_prefix_key {
  uint8_t bytes[32];
} pqc_prefix_key;

typedef enum pqc_cache_event_kind {
  PQC_CACHE_STORED = 1,  /* pqc_match_prefix finds the key from now on */
  PQC_CACHE_REMOVED = 2, /* pqc_match_prefix finds the key no longer; the reader may not know it */
  PQC_CACHE_CLEARED = 3  /* the reader forgets all keys of the cache */
} pqc_cache_event_kind;

/* One event. Used in arrays, so it never grows. */
typedef struct pqc_cache_event {
  /* Position of the event. Each change of the cache has the next number of its epoch, which is
   * random, and another one after a restart of the sidecar's worker. The number of
   * PQC_CACHE_CLEARED is 0. PQC_CACHE_STORED of the keys that are present then follow it, with the
   * numbers that they had first. */
  uint64_t epoch;
  uint64_t number;
  pqc_cache_event_kind kind;
  uint64_t token_end; /* tokens up to the end of the key's: a multiple of 128; 0 when cleared */
  pqc_prefix_key key;
  pqc_prefix_key parent; /* key of the 128 tokens before, or the root */
} pqc_cache_event;

typedef struct pqc_cache_events pqc_cache_events;

/* Opens the events of a cache, after the position of the last event that the caller has applied
 * (0 and 0 = none). Events that the sidecar no longer has (it holds the newest 16384 of a cache,
 * and none of an earlier worker) are replaced by PQC_CACHE_CLEARED and PQC_CACHE_STORED of each
 * present key; so are those of a caller that reads too slowly. A caller that applies all events in
 * order knows exactly the keys that are present, a moment later. Of a rank's cache, these are the
 * keys of this rank.
 *
 * The handle may be closed in any order with the cache and the client. It reconnects by itself
 * after a restart of the sidecar's worker.
 *
 * Errors: PQC_INVALID_ARGUMENT  cache, events
 *         PQC_UNIMPLEMENTED     libpqcached_rpc is older */
PQC_API pqc_status pqc_cache_events_open(pqc_cache* cache, uint64_t epoch, uint64_t number,
                                         pqc_cache_events** events);

/* Waits for events, at most timeout_ms (0 = takes what has arrived; PQC_TIMEOUT_POLL has no meaning
 * of its own here), and writes up to `capacity`
 * (at least 1) of them into out. *count is their number; 0 if there are none by then. For one
 * thread at a time. After an error, the next call continues behind the last event.
 *
 * Errors: PQC_INVALID_ARGUMENT    events, out, capacity, count
 *         PQC_NOT_FOUND           the cache was dropped
 *         PQC_RESOURCE_EXHAUSTED  16 readers of the tenant are open, or 1024 of all
 *         PQC_UNIMPLEMENTED       the sidecar is older
 *         PQC_UNAVAILABLE         with a retry time: no worker answered within timeout_ms */
PQC_API pqc_status pqc_cache_events_next(pqc_cache_events* events, uint32_t timeout_ms,
                                         pqc_cache_event* out, uint32_t capacity, uint32_t* count);

/* Closes the handle; NULL is no error. */
PQC_API void pqc_cache_events_close(pqc_cache_events* events);

/* Computes the keys of a prompt, which has the token_ids or content_keys, and the extra_key, of
 * `prompt`; its other fields must be 0. Sets *count to the number of whole steps of 128 tokens, and
 * writes their keys into keys [capacity], stored or not, and the root of the chain into *root (may
 * be NULL). With it, a router can compute the keys of further prompts by itself. One RPC.
 *
 * Errors: PQC_INVALID_ARGUMENT  cache, count, keys; a field of `prompt`
 *         PQC_OUT_OF_RANGE      capacity is less than *count, which is set
 *         PQC_UNIMPLEMENTED     libpqcached_rpc or the sidecar is older */
PQC_API pqc_status pqc_prefix_keys(pqc_cache* cache, const pqc_sequence_options* prompt,
                                   pqc_prefix_key* root, pqc_prefix_key* keys, uint64_t capacity,
                                   uint64_t* count);

#ifdef __cplusplus
}
#endif

#endif /* PQCACHED_CACHE_EVENTS_H_ */

/* pqcached client: pages under keys, for stores that hand over bytes only (LMCache, HiCache, KVBM).
 * The conventions of client.h hold.
 *
 * A page is a number of bytes, at most PQC_MAX_PAGE_BYTES, whose meaning only the engine knows. Its
 * key, PQC_MIN_PAGE_KEY_BYTES to PQC_MAX_PAGE_KEY_BYTES, is usually a hash of the content; engines
 * with longer names hash them. Pages are in a page cache of the tenant, which has memory of its
 * own. A page never changes: a key that is stored keeps its page. When the memory is full, the
 * pages that were used longest ago are evicted, except leased ones. A page takes whole units of 64
 * KiB.
 *
 * On the local path pages pass through shared memory, except calls with little data and pages that
 * exceed a slot of staging (staging_slot_bytes of pqc_client_options).
 *
 * Pages are reported only when they are stored whole. They outlive the sidecar's worker; leases do
 * not. Another tenant's pages are never found.
 *
 * Example, which stores a page, and reads it if it is still there:
 *
 *     pqc_page_source source = PQC_INIT(pqc_page_source);
 *     source.key = key;
 *     source.key_bytes = key_bytes;
 *     source.data = data;
 *     source.data_bytes = data_bytes;
 *     pqc_status status = pqc_page_put(cache, &source, 1);
 *     pqc_page_target target = PQC_INIT(pqc_page_target);
 *     target.key = key;
 *     target.key_bytes = key_bytes;
 *     target.data = buffer;
 *     target.capacity_bytes = buffer_bytes;
 *     if (status == PQC_OK) status = pqc_page_get(cache, &target, 1);
 *     if (target.outcome == PQC_PAGE_FOUND) use_page(buffer, target.size_bytes);
 */
#ifndef PQCACHED_PAGE_CACHE_H_
#define PQCACHED_PAGE_CACHE_H_

#include "pqcached/client.h"

#ifdef __cplusplus
extern "C" {
#endif

#define PQC_MIN_PAGE_KEY_BYTES 16
#define PQC_MAX_PAGE_KEY_BYTES 64
#define PQC_MAX_PAGE_BYTES 33554432
/* Most pages, or keys, of one call. */
#define PQC_MAX_PAGES 4096

typedef struct pqc_page_cache pqc_page_cache;

typedef struct pqc_page_cache_spec {
  size_t struct_size;
  const char* name;        /* 1..128 bytes; page caches and other caches share their names */
  uint64_t capacity_bytes; /* memory of the pages, at least 1; rounded up to whole units */
  uint64_t quota_bytes;    /* bytes that may be in use, at most the capacity; 0 = the capacity */
} pqc_page_cache_spec;

/* Opens the tenant's page cache of this name; creates it if it does not exist. An open one keeps
 * its capacity and quota. It counts in the limits of caches and of their memory, and is dropped as
 * other caches are (pqc_cache_open), except while a page of it is leased.
 *
 * Errors: PQC_INVALID_ARGUMENT     a field of `spec`
 *         PQC_FAILED_PRECONDITION  spec.name is the name of an open cache of rows
 *         PQC_RESOURCE_EXHAUSTED   as pqc_cache_open
 *         PQC_UNIMPLEMENTED        libpqcached_rpc or the sidecar is older
 *         PQC_UNAVAILABLE          also while the sidecar is draining */
PQC_API pqc_status pqc_page_cache_open(pqc_client* client, const pqc_page_cache_spec* spec,
                                       pqc_page_cache** cache);
/* Closes the handle; the page cache remains in the sidecar. No RPC. NULL does nothing. */
PQC_API void pqc_page_cache_close(pqc_page_cache* cache);
/* Drops the page cache in the sidecar with all of its pages. The handle remains, and is still to be
 * closed; further calls on it are PQC_NOT_FOUND.
 *
 * Errors: PQC_FAILED_PRECONDITION  a page is leased
 *         PQC_NOT_FOUND            it was dropped before */
PQC_API pqc_status pqc_page_cache_drop(pqc_page_cache* cache);

/* Outcome of one page of a call. */
typedef enum pqc_page_outcome {
  PQC_PAGE_UNKNOWN = 0,  /* the call has failed before */
  PQC_PAGE_STORED = 1,   /* put: it is stored now */
  PQC_PAGE_PRESENT = 2,  /* put: the key has a page, which stays; the bytes were not compared */
  PQC_PAGE_NO_ROOM = 3,  /* put: not stored, there is no memory even after eviction */
  PQC_PAGE_FOUND = 4,    /* get: it is in the caller's memory */
  PQC_PAGE_MISSING = 5,  /* get: no page has the key */
  PQC_PAGE_TOO_LARGE = 6 /* get: it exceeds capacity_bytes; nothing was written */
} pqc_page_outcome;

/* A page to store. */
typedef struct pqc_page_source {
  size_t struct_size;
  const void* key;
  uint64_t key_bytes;
  const void* data;
  uint64_t data_bytes;      /* 1..PQC_MAX_PAGE_BYTES */
  pqc_page_outcome outcome; /* out */
} pqc_page_source;

/* Stores pages, each for itself: pages [page_count], at most PQC_MAX_PAGES. The call may be split
 * into several RPCs; after a failure, outcome says which pages were stored before. No page of one
 * RPC is evicted for another one of it. Harmless to repeat.
 *
 * Errors: PQC_INVALID_ARGUMENT  pages[i].key_bytes, pages[i].data_bytes (nothing is stored)
 *         PQC_NOT_FOUND         the page cache was dropped
 *         PQC_OUT_OF_RANGE      pages[i].data_bytes exceeds the sidecar's max_message_bytes, and
 *                               does not pass through shared memory */
PQC_API pqc_status pqc_page_put(pqc_page_cache* cache, pqc_page_source* pages, uint32_t page_count);

/* Memory for a page. */
typedef struct pqc_page_target {
  size_t struct_size;
  const void* key;
  uint64_t key_bytes;
  void* data;               /* the caller's; may be NULL when capacity_bytes is 0 */
  uint64_t capacity_bytes;  /* bytes that `data` has room for */
  uint64_t size_bytes;      /* out: bytes of the page; 0 when it is missing */
  pqc_page_outcome outcome; /* out */
} pqc_page_target;

/* Copies pages into the caller's memory: pages [page_count], at most PQC_MAX_PAGES. Missing pages
 * and pages that are too large are outcomes, not errors. Bytes behind size_bytes are unchanged.
 *
 * Errors: PQC_INVALID_ARGUMENT    pages[i].key_bytes, pages[i].data
 *         PQC_NOT_FOUND           the page cache was dropped
 *         PQC_RESOURCE_EXHAUSTED  a page exceeds the sidecar's max_message_bytes, and does not pass
 *                                 through shared memory */
PQC_API pqc_status pqc_page_get(pqc_page_cache* cache, pqc_page_target* pages, uint32_t page_count);

typedef struct pqc_page_key {
  size_t struct_size;
  const void* key;
  uint64_t key_bytes;
  uint64_t size_bytes; /* out: bytes of the page; 0 when no page has the key */
} pqc_page_key;

/* Finds which keys have pages: keys [key_count], at most PQC_MAX_PAGES. With lease_ms (0 = no
 * lease, at most 3600000) the pages that are found are not evicted for that time, so that another
 * process still finds them; the longest lease of a page counts. A lease cannot be given back; it
 * ends when its time is over, or the sidecar's worker ends. One RPC.
 *
 * Errors: PQC_INVALID_ARGUMENT  keys[i].key_bytes, lease_ms
 *         PQC_NOT_FOUND         the page cache was dropped */
PQC_API pqc_status pqc_page_exists(pqc_page_cache* cache, pqc_page_key* keys, uint32_t key_count,
                                   uint64_t lease_ms);

#ifdef __cplusplus
}
#endif

#endif /* PQCACHED_PAGE_CACHE_H_ */

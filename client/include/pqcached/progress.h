/* pqcached client: what a client knows of a sequence without an RPC. A part of client.h, which
 * includes it and whose conventions hold.
 *
 * Example, which decides what an engine's loop does next:
 *
 *     pqc_progress progress = PQC_INIT(pqc_progress);
 *     pqc_status status = pqc_sequence_progress(sequence, &progress);
 *     if (status != PQC_OK) return status;
 *     if (progress.is_lost) return reopen_client();
 *     if (progress.is_restarting) return decode_others();
 *     if (progress.layers_ready < progress.layer_count) return attend_exactly();
 */
#ifndef PQCACHED_PROGRESS_H_
#define PQCACHED_PROGRESS_H_

#include "pqcached/client.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct pqc_progress {
  size_t struct_size;
  uint64_t passed_tokens; /* tokens of the sequence, those of finished steps included whose rows are
                              still being sent */
  uint64_t stored_tokens; /* leading tokens whose rows are stored in all layers */
  uint64_t indexed_tokens; /* leading tokens that the index covers in all layers; local path only */
  uint32_t layer_count;    /* stored layers */
  /* Of them, those whose index covers all stored tokens, and those of kinds that have no index;
   * local path only. */
  uint32_t layers_ready;
  uint32_t has_index;     /* 1: the sequence has the index below; local path only */
  uint32_t is_changing;   /* 1: a call of this client changes the sequence (ingest, build, ...) */
  uint32_t is_suspended;  /* 1: until pqc_sequence_resume */
  uint32_t is_revoked;    /* 1: another call shortened or dropped the sequence, or its lease has
                              expired; the next step begins with a new lease */
  uint32_t is_unattached; /* 1: the client holds no lease yet, or fetches a newer segment map: the
                              fields about rows and index may be out of date until the next calls */
  uint32_t is_restarting; /* 1: no worker answers at present; local path only */
  uint32_t is_lost;       /* 1: the session is lost, and a new client is needed; local path only */
  pqc_status row_status;  /* pending error of rows of finished steps (pqc_sequence_flush) */
} pqc_progress;
/* Fills *progress with what this client knows of the sequence, without waiting and without an RPC:
 * from the sidecar's memory on the local path, from the last answers on the remote path. On the
 * local path, the first call and a call that finds a newer segment map start to fetch it on a
 * thread of the client; a later call uses it. The index is the live index, or the cache's default
 * one. The call works at any time, also during a step, a build and a restart of the worker.
 *
 * Errors: PQC_INVALID_ARGUMENT  sequence, progress */
PQC_API pqc_status pqc_sequence_progress(pqc_sequence* sequence, pqc_progress* progress);

typedef struct pqc_client_counts {
  size_t struct_size;
  uint64_t rpcs;            /* RPCs that a call of this client waited for */
  uint64_t background_rpcs; /* RPCs that no call waited for: rows of finished steps */
  uint64_t mapped_bytes;    /* bytes of the sidecar's pools that this process maps */
  uint64_t lease_count;     /* leases on sequences that the client holds; 0 on the remote path */
} pqc_client_counts;
/* Fills *counts with the client's counters since it was opened. No RPC; for status pages and
 * tests. */
PQC_API pqc_status pqc_client_count(const pqc_client* client, pqc_client_counts* counts);

#ifdef __cplusplus
}
#endif

#endif /* PQCACHED_PROGRESS_H_ */

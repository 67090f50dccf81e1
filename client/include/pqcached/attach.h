/* pqcached client: one sequence in several processes of an engine, and sequences that continue
 * others. A part of client.h, which includes it and whose conventions hold.
 *
 * A scheduler creates a sequence, so that its prefix is still there when a worker uses it, and
 * gives the number of pqc_sequence_id to the worker, by the engine's own messages. Creation alone
 * protects the sequence only for as long as the sidecar's option evict_idle says (1 minute): when
 * the worker may come later, the scheduler calls pqc_sequence_pin. The worker opens a handle of
 * its own, over its own client. The sequence belongs to the session of the process that created
 * it: it is dropped when that session ends, or when any process calls pqc_sequence_drop.
 *
 * Several processes may read a sequence at once. Only one of them may write at a time (rows, steps,
 * truncation, builds), and the engine has to see to that. The library excludes calls and steps of
 * one handle only: when two handles write the same positions one after the other, both calls
 * return PQC_OK, and the later rows are taken for a repeat and discarded. A step at an earlier
 * position removes the tokens that the other process has stored behind it. Before another process
 * writes, the present writer calls pqc_sequence_flush or pqc_sequence_detach: rows that it has not
 * stored yet are not part of *token_count.
 *
 * Example, in the worker:
 *
 *     uint64_t tokens = 0;
 *     pqc_sequence* sequence = NULL;
 *     pqc_status status = pqc_sequence_attach(cache, sequence_id, &sequence, &tokens);
 *     if (status == PQC_OK) status = serve(sequence, tokens);
 *     if (sequence) pqc_sequence_detach(sequence);
 */
/* Before the guard: client.h includes this header at its end, with the types that it needs. */
#include "pqcached/client.h"

#ifndef PQCACHED_ATTACH_H_
#define PQCACHED_ATTACH_H_

#ifdef __cplusplus
extern "C" {
#endif

/* Opens a handle for a sequence that this or another client of the same tenant has created in the
 * same cache, which each has opened under its name. *sequence is set on PQC_OK, and NULL otherwise.
 * *token_count (may be NULL) receives the tokens whose rows are complete over all stored layers:
 * the next position to ingest. The handle has the sequence's live index, if there is one. One RPC;
 * harmless to repeat.
 *
 * Errors: PQC_NOT_FOUND      sequence_id: the cache has no such sequence, or only the cached prefix
 *                            of one that has ended
 *         PQC_UNIMPLEMENTED  libpqcached_rpc or the sidecar is older than this call */
PQC_API pqc_status pqc_sequence_attach(pqc_cache* cache, uint64_t sequence_id,
                                       pqc_sequence** sequence, uint64_t* token_count);
/* Waits, as pqc_sequence_flush does, until the rows of finished steps are stored, and closes the
 * handle, whatever the status is. The sequence remains: it is dropped when the session that created
 * it ends, or by pqc_sequence_drop of another handle. Works on every handle, also on that of the
 * creator. No step and no decoder may have the sequence: a step in progress would fail. Operations
 * of this handle that have not ended are cancelled. NULL does nothing. Not repeatable: the handle
 * is closed.
 *
 * Errors: those of pqc_sequence_flush; rows that are not stored by then are discarded */
PQC_API pqc_status pqc_sequence_detach(pqc_sequence* sequence);

/* Replaces `count` sequences by `new_count` ones (each 1 to 256), of which reordered[i] continues
 * sequences[from[i]] with all of its tokens: it is that sequence itself where from names it for the
 * first time, and a fork of it (pqc_sequence_fork) where from names it again. Sequences that from
 * does not name are dropped, and their handles freed. `reordered` may be `sequences`. One RPC; the
 * leases of the forks are acquired in the background. With a libpqcached_rpc or a sidecar of 0.1,
 * one RPC for each fork and drop. In a step of a beam search, in which beam i continues beam
 * parents[i]: pqc_sequences_reorder(beams, n, parents, n, beams).
 *
 * All or nothing: after an error `sequences` and its handles are as before. After PQC_UNAVAILABLE
 * and PQC_DEADLINE_EXCEEDED the sidecar may have done the work: forks that end with the session,
 * and dropped sequences, whose handles return PQC_NOT_FOUND.
 *
 * Errors: PQC_INVALID_ARGUMENT    sequences[i]: NULL, listed twice, or of another cache; from[i]
 *         PQC_ABORTED             sequences[i] is in a step, or another call changes it: repeat
 *         PQC_NOT_FOUND           from[i]: the sidecar has dropped or evicted that sequence
 *         PQC_RESOURCE_EXHAUSTED  the sidecar's max_sequences
 *         and the pending error of earlier steps' rows of a sequence */
PQC_API pqc_status pqc_sequences_reorder(pqc_sequence** sequences, uint32_t count,
                                         const uint32_t* from, uint32_t new_count,
                                         pqc_sequence** reordered);

#ifdef __cplusplus
}
#endif

#endif /* PQCACHED_ATTACH_H_ */

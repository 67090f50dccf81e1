/* pqcached client: sequences of a batch that continue others, in one call. A part of client.h,
 * which includes it and whose conventions hold.
 *
 * Example, a step of a beam search, in which beam i continues beam parents[i]:
 *
 *     static pqc_status reorder_beams(pqc_sequence** beams, const uint32_t* parents, uint32_t n) {
 *       return pqc_sequences_reorder(beams, n, parents, n, beams);
 *     }
 */
/* Before the guard: client.h includes this header at its end, with the types that it needs. */
#include "pqcached/client.h"

#ifndef PQCACHED_REORDER_H_
#define PQCACHED_REORDER_H_

#ifdef __cplusplus
extern "C" {
#endif

/* Replaces `count` sequences by `new_count` ones (each 1 to 256), of which reordered[i] continues
 * sequences[from[i]] with all of its tokens: it is that sequence itself where from names it for the
 * first time, and a fork of it (pqc_sequence_fork) where from names it again. Sequences that from
 * does not name are dropped, and their handles freed. `reordered` may be `sequences`. One RPC; the
 * leases of the forks are acquired in the background. With a libpqcached_rpc or a sidecar of 0.1,
 * one RPC for each fork and drop.
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

#endif /* PQCACHED_REORDER_H_ */

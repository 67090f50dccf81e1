/* pqcached client: rows that a call passes on without waiting until they are stored, and samples of
 * a prompt's queries. A part of client.h, which includes it and whose conventions hold.
 *
 * Example, a prompt's chunk whose rows the engine overwrites afterwards:
 *
 *     status = pqc_enqueue_rows(sequence, chunk_begin, layers, layer_count, NULL);
 *     if (status != PQC_OK) return status;
 *     // ... the model computes the next chunk, or decodes ...
 *     return pqc_sequence_flush(sequence);  // waits, and returns the error of earlier rows
 */
/* Before the guard: client.h includes this header at its end, with the types that it needs. */
#include "pqcached/client.h"

#ifndef PQCACHED_ROWS_H_
#define PQCACHED_ROWS_H_

#ifdef __cplusplus
extern "C" {
#endif

/* Passes on the rows of prefill tokens of all stored layers, as pqc_ingest stores them, and returns
 * when they are copied into the client's memory (on the local path the staging ring): the caller's
 * tensors may change then. layers[i] has keys [tokens, kv_heads, key_dim] and values [tokens,
 * kv_heads, value_dim] from position `first_position` on, the sequence's next position; each stored
 * layer occurs once. options may be NULL.
 *
 * The client sends the rows in the background, in the order of the calls and of pqc_step_end, and
 * again after the end of a worker. An error is returned by the next such call, by pqc_step_begin
 * and by pqc_sequence_flush, which clears it; the rows behind it are not stored. Waits only while
 * more than 64 MiB of rows are on their way, so that a call of many rows takes as long as most of
 * them need.
 *
 * Errors: PQC_INVALID_ARGUMENT   layer_count, a layer that is missing or listed twice, a shape, the
 *                                options, a gap behind rows that are on their way; NaN, infinity
 *                                and a gap behind stored rows only when the rows are sent
 *         PQC_ABORTED            a step has the sequence, or another call changes it: repeat
 *         PQC_DEADLINE_EXCEEDED  the sidecar is slower than the engine; some of the first rows are
 *                                on their way: repeat the call
 *         and the error of earlier rows ("rows of an earlier step") */
PQC_API pqc_status pqc_enqueue_rows(pqc_sequence* sequence, uint64_t first_position,
                                    const pqc_layer_rows* layers, uint32_t layer_count,
                                    const pqc_row_options* options);

/* Queries of some tokens of a prompt in one layer, after RoPE. An index of layout
 * PQC_SUBSPACES_WEIGHTED is trained on them, and graphs are built from them. Useful are those of
 * the last 64 tokens, which is where a question often is, and of every n-th token before them, 512
 * in total. */
typedef struct pqc_query_samples {
  size_t struct_size;
  uint32_t layer;
  const uint64_t* positions; /* [position_count], ascending: tokens that are stored */
  uint64_t position_count;   /* >= 1 */
  pqc_tensor queries;        /* [position_count, query_heads, key_dim], any strides */
} pqc_query_samples;

/* Adds query samples [sample_count], 1..1024, of layers that indexes have, before the index is
 * built: all of them or none. A position that has samples gets the new ones. A layer keeps 1024
 * positions: those of its newest 64 samples, and of earlier ones as many as fit, with equal gaps.
 * They take memory of the cache (positions x query_heads x key_dim numbers of its dtype), and are
 * shared with forks, and with prompts that begin alike. They are lost when the sidecar's worker
 * ends, and when the sequence does: what is retained of it has none. An index that was trained
 * needs them no longer; a live one is built from those that it has when the first rows are indexed.
 * Waits for one RPC.
 *
 * Errors: PQC_INVALID_ARGUMENT    sample_count, or samples[i]: a layer that is not stored or has no
 *                                 index, positions that do not ascend or are not stored, the shape,
 *                                 NaN or infinity
 *         PQC_ABORTED             a step has the sequence, or another call changes it: repeat
 *         PQC_RESOURCE_EXHAUSTED  the cache is full
 *         PQC_UNIMPLEMENTED       the sidecar, or libpqcached_rpc, is older than query samples */
PQC_API pqc_status pqc_add_query_samples(pqc_sequence* sequence, const pqc_query_samples* samples,
                                         uint32_t sample_count);

#ifdef __cplusplus
}
#endif

#endif /* PQCACHED_ROWS_H_ */

/* pqcached client: decode steps. A part of client.h, which brings it along and whose conventions hold.
 */
#ifndef PQCACHED_STEP_H_
#define PQCACHED_STEP_H_

#include "pqcached/client.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- Steps
 *
 * A step is one decode position (or several: speculation) over all layers for a batch of sequences:
 *
 *   pqc_step_begin                 host: readiness, epoch, back-pressure
 *   per layer: pqc_step_select     positions, for engines with their own paged kernels
 *          or pqc_step_attend      (o, lse) of the selected middle; the engine attends its own sink
 *                                  and window, and merges
 *          or pqc_step_attend_begin ... pqc_step_attend_wait: the same beside the engine's own work
 *   pqc_step_end                   hands in the rows of the new tokens; abandons with pqc_step_abandon
 *
 * On the local path none of them waits for an RPC, but the first step of a live index, which ends the
 * prefill: rows of finished steps travel in the background, and the client keeps them until they are
 * acknowledged. Tokens that are not stored yet must lie in
 * the window: pqc_step_begin waits until query_position - window_tokens are. Everything of item i lies
 * at the offset of its query tokens: packed tensors have the query tokens of all items, in order.
 *
 * One thread per step; several steps of different sequences may run at once. A sequence is in at most
 * one step at a time. */

typedef struct pqc_step pqc_step;

typedef struct pqc_step_item {
  size_t struct_size;
  pqc_sequence* sequence;  /* of one cache of the client, each at most once in a step */
  uint64_t query_position; /* of its first query token, whose row pqc_step_end hands in */
  uint32_t query_length;   /* 1..8; 0 = 1 */
} pqc_step_item;

typedef struct pqc_step_options {
  size_t struct_size;
  const pqc_selection* selection; /* of all items and layers, unless a call brings another one */
  uint32_t timeout_ms;            /* of the whole step's waiting; 0 = the client's */
} pqc_step_options;

/* Errors: PQC_INVALID_ARGUMENT (items[i]: unknown, of another client, listed twice, positions beyond
 *         the tail), PQC_FAILED_PRECONDITION (suspended; no such index), PQC_DEADLINE_EXCEEDED (rows
 *         or index not there in time), PQC_UNAVAILABLE (the session is lost) */
PQC_API pqc_status pqc_step_begin(pqc_client* client, const pqc_step_item* items,
                                  uint32_t item_count, const pqc_step_options* options,
                                  pqc_step** step);

/* positions[begins[i] + kv_head * counts[i] + j], j < counts[i]: ascending per kv head. */
typedef struct pqc_step_positions {
  size_t struct_size;
  uint32_t* positions;
  uint64_t capacity; /* of `positions`, in elements */
  uint64_t* begins;  /* [items], out */
  uint32_t* counts;  /* [items], out: k of each item, per kv head */
  uint64_t count;    /* out: elements written, or needed */
} pqc_step_positions;
/* queries: [query tokens of all items, query_heads, key_dim]. `selection` may be NULL. */
PQC_API pqc_status pqc_step_select(pqc_step* step, uint32_t layer, const pqc_tensor* queries,
                                   const pqc_selection* selection, pqc_step_positions* out);

typedef struct pqc_step_attention {
  size_t struct_size;
  float* output;            /* [query tokens of all items, query_heads, value_dim] */
  uint64_t output_capacity; /* elements */
  float* lse;               /* [query tokens of all items, query_heads] */
  uint64_t lse_capacity;
  uint32_t* counts; /* [items], out: k of each item; may be NULL */
} pqc_step_attention;
PQC_API pqc_status pqc_step_attend(pqc_step* step, uint32_t layer, const pqc_tensor* queries,
                                   const pqc_selection* selection, pqc_step_attention* out);
/* As pqc_step_attend, on other threads: what it was given must stay until pqc_step_attend_wait, which
 * gives the status. At most one at a time. */
PQC_API pqc_status pqc_step_attend_begin(pqc_step* step, uint32_t layer, const pqc_tensor* queries,
                                         const pqc_selection* selection, pqc_step_attention* out);
PQC_API pqc_status pqc_step_attend_wait(pqc_step* step);

/* Ends the step and closes the handle, whatever the status says. A query_position below the tokens
 * handed in before rolls back to it first. layers: every stored layer once, K and V [query tokens of
 * all items, kv_heads, dim]; copied. accepted (may be NULL = all): how many of each item's query
 * tokens stay; the rest is rolled back, also where it was handed in before. Checks that all results
 * came from rows that still stood: PQC_UNAVAILABLE or PQC_ABORTED say that they must not be used. */
PQC_API pqc_status pqc_step_end(pqc_step* step, const pqc_layer_rows* layers, uint32_t layer_count,
                                const uint32_t* accepted);
PQC_API void pqc_step_abandon(pqc_step* step); /* closes the handle without rows; NULL is fine */

/* Waits until all rows that steps handed in, or pqc_gpu_ingest, are stored, and tells why one was not. */
PQC_API pqc_status pqc_sequence_flush(pqc_sequence* sequence);

/* ---- Convenience session: keeps sink and window too
 * For engines without a cache of their own: prefill each layer, then decode layer by layer in ascending
 * order; the step around it begins with the first layer and ends with the last. */

typedef struct pqc_decoder pqc_decoder;

/* Uses the sequence until it is closed; selection: of all layers. */
PQC_API pqc_status pqc_decoder_open(pqc_sequence* sequence, const pqc_selection* selection,
                                    pqc_decoder** decoder);
PQC_API void pqc_decoder_close(pqc_decoder* decoder); /* NULL is fine */
/* K and V [tokens, kv_heads, dim] of the next tokens of a layer. */
PQC_API pqc_status pqc_decoder_prefill(pqc_decoder* decoder, uint32_t layer, const pqc_tensor* keys,
                                       const pqc_tensor* values);
/* q [query_heads, key_dim], k [kv_heads, key_dim], v [kv_heads, value_dim] of the next token; output
 * [query_heads, value_dim]: attention over sink, selected and window, the token itself included.
 * The first decode builds what the sequence's index lacks. */
PQC_API pqc_status pqc_decoder_decode(pqc_decoder* decoder, uint32_t layer, const pqc_tensor* query,
                                      const pqc_tensor* key, const pqc_tensor* value, float* output,
                                      uint64_t output_capacity);

#ifdef __cplusplus
}
#endif

#endif /* PQCACHED_STEP_H_ */

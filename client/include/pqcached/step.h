/* pqcached client: decode steps. A part of client.h, which includes it and whose conventions hold.
 *
 * A step is one decode position (or several: speculation) over all layers for a batch of sequences:
 *
 *   pqc_step_begin                 checks readiness, pins the codebooks, waits for room to send
 *                                  rows
 *   per layer: pqc_step_topk       positions, for engines with their own paged kernels
 *          or pqc_step_topk_pages  engine pages, for kernels that attend to whole ones
 *          or pqc_step_attend      (output, lse) of the selected tokens; the engine attends its own
 *                                  sink and window, and merges
 *          or pqc_step_attend_begin ... pqc_step_attend_wait: the same, concurrently with the
 *                                  engine's own work
 *          or pqc_step_attend_range   (output, lse) of all tokens of a range
 *          or pqc_step_decode         the complete attention, sink and window included (decode.h)
 *          or pqc_step_attend_positions   the same of positions that the engine gives
 *   pqc_step_end                   passes the rows of the new tokens and closes the step;
 *                                  pqc_step_abandon closes it without rows
 *
 * On the local path no step call waits for an RPC, with three exceptions of pqc_step_begin: the
 * first step of a live index ends the prefill, the first step or read of a handle acquires a lease
 * and maps the pool, and a segment map that has changed is read again, after a build for example.
 * Rows (KV entries) of finished steps are sent in the background, and the client keeps them until
 * they are acknowledged. Tokens that are not stored yet must lie in the window: pqc_step_begin
 * waits until query_position - window_tokens tokens are stored. Packed tensors hold the query
 * tokens of all items, in the order of the items.
 *
 * An engine whose loop must not stop begins steps with PQC_STEP_NO_WAIT: pqc_step_begin and the
 * calls for layers then return at once, with a retry time, while anything that they need is
 * missing. RPCs that they need (the first lease, the end of a prefill, a newer segment map) are
 * then made on a thread of the client. On the remote path pqc_step_begin makes no RPC either, and a
 * call for a layer is one RPC, which does the layer's work in the sidecar: the call waits for the
 * answer, and for nothing else.
 *
 * No call changes the structs that describe its arguments, pqc_step_attention included: an engine
 * may fill them once and pass them to any number of calls, layers and steps, while the memory that
 * they refer to stays. pqc_step_topk and pqc_step_topk_pages set the fields of their outputs that
 * are marked "out", and no others.
 *
 * One thread per step; several steps of different sequences may run concurrently. A handle of a
 * sequence is in at most one step at a time, and no other call on it changes the sequence during a
 * step. Between several handles of a sequence, attach.h says what holds.
 *
 * An engine that calls pqc_step_attend attends to sink and window by itself. For query token i of
 * an item, at position p = query_position + i, these are
 *
 *   the sink    [0, sink_tokens)
 *   the window  [query_position + 1 - window_tokens, p]: the last window_tokens tokens of the
 *               item's first query token, and the i tokens behind that
 *
 * without the excluded ranges. The candidates of all query tokens of the item are the tokens
 * between these two, [sink_tokens, query_position + 1 - window_tokens), whether the query tokens
 * share a selection or each has its own (PQC_STEP_SELECT_PER_TOKEN). A window of window_tokens
 * tokens that ended at p would leave out i tokens that no selection contains. Where no token lies
 * between the two, the engine attends to all of [0, p].
 *
 * For example, with 16 sink tokens, 64 window tokens and an item of 3 query tokens at positions
 * 1000, 1001 and 1002, the candidates are [16, 937) for each of the 3. The engine attends by itself
 * to [0, 16) and
 *
 *   token 0, position 1000: [937, 1000], which are 64 tokens
 *   token 1, position 1001: [937, 1001], which are 65 tokens
 *   token 2, position 1002: [937, 1002], which are 66 tokens
 *
 * pqc_step_decode attends to these tokens as well.
 *
 * Example, one position of one sequence:
 *
 *     pqc_step_item item = PQC_INIT(pqc_step_item);
 *     item.sequence = sequence;
 *     item.query_position = position;
 *     pqc_selection selection = PQC_INIT(pqc_selection);
 *     selection.sink_tokens = 16;
 *     selection.window_tokens = 64;
 *     selection.ratio = 0.1;
 *     pqc_step_options options = PQC_INIT(pqc_step_options);
 *     options.selection = &selection;
 *     pqc_step* step = NULL;
 *     pqc_status status = pqc_step_begin(client, &item, 1, &options, &step);
 *     if (status != PQC_OK) return status;
 *
 *     // Per layer, once its query is computed; the engine merges its sink and window.
 *     pqc_step_attention attention = PQC_INIT(pqc_step_attention);
 *     attention.output = output;  // [query_heads, value_dim]
 *     attention.output_capacity = 32 * 128;
 *     attention.lse = lse;  // [query_heads]
 *     attention.lse_capacity = 32;
 *     status = pqc_step_attend(step, 0, query, NULL, &attention);
 *     if (status != PQC_OK) {
 *       pqc_step_abandon(step);
 *       return status;
 *     }
 *
 *     // The new token's rows in all stored layers; the step is closed in any case.
 *     return pqc_step_end(step, rows, 1, NULL);
 */
#ifndef PQCACHED_STEP_H_
#define PQCACHED_STEP_H_

#include "pqcached/client.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- Steps */

typedef struct pqc_step pqc_step;

typedef struct pqc_step_item {
  size_t struct_size;
  pqc_sequence* sequence;  /* all of one cache of the client, each at most once in a step */
  uint64_t query_position; /* absolute position of the first query token; its row is passed to
                              pqc_step_end */
  uint32_t query_length;   /* query tokens of this item, 1..8; 0 = 1 */
} pqc_step_item;

/* Flags of a step; see pqc_step_begin. */
typedef enum pqc_step_flag {
  PQC_STEP_NO_WAIT = 1,             /* no call of the step waits */
  PQC_STEP_EXACT_UNTIL_INDEXED = 2, /* attends to all candidates where the index is not ready */
  PQC_STEP_SELECT_PER_TOKEN = 4,    /* each query token has a selection of its own */
  PQC_STEP_DECODES = 8              /* on a GPU, pqc_step_decode may be called */
} pqc_step_flag;

typedef struct pqc_step_options {
  size_t struct_size;
  const pqc_selection* selection; /* for all items and layers; a layer's call may pass another one.
                                     NULL = every call passes one */
  uint32_t timeout_ms;            /* deadline of the whole step's waits; 0 = the client's;
                                     PQC_TIMEOUT_POLL = PQC_STEP_NO_WAIT */
  uint64_t flags;                 /* a sum of pqc_step_flag */
} pqc_step_options;

/* Begins a step for `item_count` items (1 to 4096). *step is set on PQC_OK, and NULL otherwise;
 * options may be NULL. With a selection, waits until the rows of all candidates are stored, and
 * checks that the index exists (on the remote path the first layer's call does); each layer's call
 * waits for its own layer of the index. Returns the pending error of earlier rows of a sequence:
 * one of a step's rows remains pending until pqc_sequence_flush returns it.
 *
 * With PQC_STEP_NO_WAIT, no call of the step waits, for engines that poll from their own loop:
 * PQC_UNAVAILABLE while no worker serves the session (the client connects to the next one in the
 * background), and PQC_DEADLINE_EXCEEDED where rows, an index, a lease, or room to send rows are
 * not ready, both with a retry time: a repetition finds what was fetched in the background. On the
 * remote path a step begins by what the client knows: that a worker holds the session, and the
 * tokens of the sequence by the last answer, which pqc_step_begin has fetched in the background
 * where query_position is beyond them. Results never come from that knowledge, but from the worker
 * that answers a layer's RPC: one that has ended since is PQC_UNAVAILABLE. Not for a step on a GPU.
 *
 * With PQC_STEP_EXACT_UNTIL_INDEXED, a step does not wait for an index that is missing or still
 * being built: pqc_step_attend attends to all candidates instead, layer by layer (on the remote
 * path all items of the call together), so that the first token after a prefill comes at once. Its
 * `counts` say how many tokens that were. pqc_step_topk waits as without the flag. An index never
 * becomes ready unless the sequence has a live index, or pqc_build_index is called: another thread
 * may build while steps run. Not for a step on a GPU.
 *
 * The query tokens of an item share a selection, which is made by the scores of all of them
 * together. With PQC_STEP_SELECT_PER_TOKEN, each query token has a selection of its own, by its own
 * scores: pqc_step_topk, pqc_step_attend, pqc_step_attend_begin and pqc_step_decode select for each
 * token of an item what they would select for an item of this token alone at the item's
 * query_position (pqc_gpu_step_topk as well). Candidates and number of selected tokens remain those
 * of the item's first query token for all of them; with PQC_BUDGET_MASS, each has a number of its
 * own in pqc_step_attend, and `counts` has the largest. Therefore the tokens that the engine must
 * attend to by itself are the same as with a shared selection (see above): with 16 sink tokens, 64
 * window tokens and 3 query tokens from position 1000 on, all 3 select from [16, 937), and token 2
 * attends by itself to [0, 16) and to [937, 1002]. An item of n tokens takes about as long as n
 * items of one token. The flag changes nothing for items of one token, and for ranges and positions
 * that the engine gives. Not for pqc_step_topk_pages.
 *
 * With PQC_STEP_DECODES, a step on a GPU takes calls of pqc_step_decode (pqc_gpu_step_begin). The
 * flag changes nothing for other steps, which take these calls in any case.
 *
 * Errors: PQC_INVALID_ARGUMENT     items[i]: a sequence of another client or cache, or listed
 *                                  twice; a query_position beyond the sequence's tokens
 *         PQC_ABORTED              items[i].sequence is in another step, or another call changes
 *                                  it: repeat when that has ended, or after the retry time; a
 *                                  concurrent truncation: repeat
 *         PQC_FAILED_PRECONDITION  the sequence is suspended, or has no such index: resume it, or
 *                                  build the index
 *         PQC_RESOURCE_EXHAUSTED   the pool is too full for a live index (shortfall in bytes)
 *         PQC_UNIMPLEMENTED        PQC_STEP_NO_WAIT and PQC_STEP_EXACT_UNTIL_INDEXED on a GPU;
 *                                  PQC_STEP_NO_WAIT on the remote path with a libpqcached_rpc of an
 *                                  earlier release; other flags
 *         PQC_OUT_OF_RANGE         candidates that no earlier call has passed: a longer window, or
 *                                  the missing rows first
 *         PQC_DEADLINE_EXCEEDED    rows or index are not ready in time, or more than 64 MiB of rows
 *                                  wait to be sent: repeat
 *         PQC_UNAVAILABLE          no worker answers in time; with PQC_STEP_NO_WAIT at once: repeat
 *                                  after the retry time
 *         and the error of an earlier step's rows of a sequence ("rows of an earlier step"): call
 *         pqc_sequence_flush, describe the sequence, and write the missing rows again */
PQC_API pqc_status pqc_step_begin(pqc_client* client, const pqc_step_item* items,
                                  uint32_t item_count, const pqc_step_options* options,
                                  pqc_step** step);

/* Positions of all items: positions[offsets[i] + kv_head * counts[i] + j], j < counts[i], of item
 * i, ascending per kv head (PQC_PER_QUERY_HEAD: per query head, in all of these places). With
 * PQC_STEP_SELECT_PER_TOKEN, those of its query token t:
 * positions[offsets[i] + (t * kv_heads + kv_head) * counts[i] + j]. With PQC_BUDGET_MASS, offsets
 * and count leave room for the most tokens; counts are of these, too, if `positions` is NULL. */
typedef struct pqc_step_positions {
  size_t struct_size;
  uint32_t* positions; /* [count]; NULL asks for offsets, counts and count only */
  uint64_t capacity;   /* of `positions`, in elements */
  uint64_t* offsets;   /* [items], out: first element of each item */
  uint32_t* counts;    /* [items], out: k of each item, per kv head */
  uint64_t count;      /* out: elements written, or needed */
} pqc_step_positions;
/* Selects the k best tokens of each item in one layer, as pqc_topk does. queries: [query tokens
 * of all items, query_heads, key_dim], or [query_heads, key_dim] for a step of one token.
 * `selection` NULL = that of pqc_step_begin. Layers may be called in any order, each any number of
 * times.
 *
 * Errors: PQC_INVALID_ARGUMENT     layer, queries, selection
 *         PQC_OUT_OF_RANGE         out.capacity; *out says how much is needed
 *         PQC_FAILED_PRECONDITION  a step on a GPU (pqc_gpu_step_topk); an attention that was
 *                                  begun and not waited for; no such index
 *         PQC_DEADLINE_EXCEEDED    the layer's index is not ready in time: begin the step again; in
 *                                  a step with PQC_STEP_NO_WAIT the call itself may be repeated
 *                                  after the retry time
 *         PQC_ABORTED              the sequence was truncated, or its lease was revoked: abandon
 *                                  the step, and begin another one
 *         PQC_UNAVAILABLE          the worker has ended: likewise (but see pqc_step_end) */
PQC_API pqc_status pqc_step_topk(pqc_step* step, uint32_t layer, const pqc_tensor* queries,
                                 const pqc_selection* selection, pqc_step_positions* out);

typedef struct pqc_step_attention {
  size_t struct_size;
  float* output; /* [query tokens of all items, query_heads, value_dim]; 0 where nothing was
                               selected */
  uint64_t output_capacity; /* of `output`, in elements */
  float* lse;               /* [query tokens of all items, query_heads]: natural log; -inf where
                               nothing was selected */
  uint64_t lse_capacity;    /* of `lse`, in elements */
  uint32_t* counts;         /* [items], out: k of each item, per kv head; may be NULL */
  /* In place of `output` and `lse`, as in pqc_attention: [query tokens of all items, query_heads,
   * value_dim] and [query tokens of all items, query_heads]. Not in a step on a GPU. */
  const pqc_tensor* output_tensor;
  const pqc_tensor* lse_tensor;
  pqc_log_base lse_base; /* of `lse` and `lse_tensor` */
} pqc_step_attention;
/* Selects as pqc_step_topk, and attends to the selected tokens with exact logits: a partial
 * attention that the engine merges with its own over sink and window (pqc_merge). Results may be
 * used only after pqc_step_end has returned PQC_OK. In a step on a GPU queries, output and lse are
 * device memory, and the call returns when the work is launched (gpu.h).
 *
 * Errors: those of pqc_step_topk; PQC_OUT_OF_RANGE: out.output_capacity, out.lse_capacity */
PQC_API pqc_status pqc_step_attend(pqc_step* step, uint32_t layer, const pqc_tensor* queries,
                                   const pqc_selection* selection, pqc_step_attention* out);
/* Attends exactly to the rows of ranges[i] for item i, ranges [items], as pqc_attend_range does:
 * causally, without an index or a selection. Waits until the rows of the ranges are stored. A range
 * may be empty, and must not go beyond the item's query_position. counts [items]: the number of
 * rows of each range. Results may be used only after pqc_step_end has returned PQC_OK. In a step on
 * a GPU queries, ranges, output and lse are device memory: see pqc_gpu_step_begin.
 *
 * Errors: PQC_INVALID_ARGUMENT     layer, queries, ranges[i]
 *         PQC_OUT_OF_RANGE         out.output_capacity, out.lse_capacity
 *         PQC_FAILED_PRECONDITION  an attention that was begun and not waited for
 *         PQC_UNIMPLEMENTED        out.counts in a step on a GPU
 *         and those of pqc_step_topk but for the index's */
PQC_API pqc_status pqc_step_attend_range(pqc_step* step, uint32_t layer, const pqc_tensor* queries,
                                         const pqc_token_range* ranges, pqc_step_attention* out);
/* Starts pqc_step_attend on other threads and returns. The memory of all arguments must stay until
 * pqc_step_attend_wait returns. At most one attention of a step is in progress.
 *
 * Errors: those of the arguments, and PQC_FAILED_PRECONDITION (one is in progress; a step on a GPU,
 *         where pqc_step_attend does not wait either) */
PQC_API pqc_status pqc_step_attend_begin(pqc_step* step, uint32_t layer, const pqc_tensor* queries,
                                         const pqc_selection* selection, pqc_step_attention* out);
/* Waits until the attention that pqc_step_attend_begin started has ended, and returns its status.
 *
 * Errors: those of pqc_step_attend, and PQC_FAILED_PRECONDITION (none was begun) */
PQC_API pqc_status pqc_step_attend_wait(pqc_step* step);

/* Checks that all that the step's calls have read so far was valid, as pqc_step_end does: after
 * PQC_OK, results of earlier calls may be used before the step ends. An engine uses it that can
 * compute a layer in another way when the check fails. After PQC_DEADLINE_EXCEEDED in a step with
 * PQC_STEP_NO_WAIT the call may be repeated; after other errors the step is to be abandoned. The
 * remote path has nothing to check.
 *
 * Errors: PQC_FAILED_PRECONDITION  an attention was begun and not waited for
 *         PQC_UNIMPLEMENTED        a step on a GPU
 *         and those of pqc_step_end that are not about its arguments */
PQC_API pqc_status pqc_step_check(pqc_step* step);

/* Ends the step and closes the handle, whatever the status is. layers [layer_count]: every stored
 * layer once that was not decoded (pqc_step_decode), with the rows of the step's tokens: keys
 * [query tokens of all items, kv_heads, key_dim] and values [.., value_dim]; copied before the call
 * returns, and stored in the background. A query_position below the tokens that earlier steps
 * passed truncates the sequence to it first. accepted [items] (NULL = all): how many of each item's
 * query tokens remain; the other ones are removed, also where an earlier step had passed them.
 *
 * Checks that the rows which the step's results were computed from were valid the whole time: the
 * results may be used on PQC_OK only. After a failure no row of the step is stored; begin the step
 * again at the same positions.
 *
 * A step on the local path outlives a worker that crashes or is killed: its calls go on in the
 * memory that the client has mapped, and the next worker stores its rows. When the next worker
 * serves before the step has ended, pqc_step_end makes one call to it, which shows that the
 * sequence is still there (with PQC_STEP_NO_WAIT in the background: then pqc_step_end may return
 * PQC_DEADLINE_EXCEEDED). The step is PQC_UNAVAILABLE when the worker was stopped in order, when
 * the whole sidecar has ended, or when two workers end during the step.
 *
 * Errors: PQC_INVALID_ARGUMENT     layers, accepted
 *         PQC_FAILED_PRECONDITION  an attention was begun and not waited for; the sequence was
 *                                  suspended
 *         PQC_ABORTED              the sequence was truncated or its lease revoked during the step
 *         PQC_DEADLINE_EXCEEDED    with PQC_STEP_NO_WAIT: the next worker has not answered yet
 *         PQC_NOT_FOUND            the next worker does not have the sequence
 *         PQC_UNAVAILABLE          the worker has ended during the step, and see above */
PQC_API pqc_status pqc_step_end(pqc_step* step, const pqc_layer_rows* layers, uint32_t layer_count,
                                const uint32_t* accepted);
/* pqc_step_end that also names tokens: options [items], one element per item of the step, whose
 * struct_size is the distance between elements (NULL = none). At most 65,536 ids or 512 content
 * keys each. Names of query tokens that are not accepted have no effect; an item of which no token
 * remains names nothing. Refused names are an error of the step's rows: pqc_sequence_flush returns
 * it.
 *
 * Errors: those of pqc_step_end; PQC_INVALID_ARGUMENT: options[i] */
PQC_API pqc_status pqc_step_end_with(pqc_step* step, const pqc_layer_rows* layers,
                                     uint32_t layer_count, const uint32_t* accepted,
                                     const pqc_row_options* options);
/* Closes the handle without rows; waits for an attention that is in progress. NULL does nothing. */
PQC_API void pqc_step_abandon(pqc_step* step);

/* Waits until all rows of the sequence that steps and pqc_gpu_ingest have passed are stored.
 * Returns the pending error of those rows, if any, and clears it: no row that followed the refused
 * one is stored, so describe the sequence, and write its rows from token_count on again.
 *
 * Errors: those of pqc_append and pqc_ingest, PQC_DEADLINE_EXCEEDED (not stored in time: repeat) */
PQC_API pqc_status pqc_sequence_flush(pqc_sequence* sequence);

/* ---- Decoder: complete attention for one sequence
 *
 * For engines without a KV cache of their own: prefill each layer, then decode layer by layer in
 * ascending order; the step around it begins with the first layer and ends with the last. One
 * thread at a time per decoder. */

typedef struct pqc_decoder pqc_decoder;

/* Opens a decoder of a sequence with one selection for all layers; the sequence must stay open,
 * and no other call changes it, until the decoder is closed. Calls that read, and
 * pqc_sequence_flush, are allowed. No RPC. *decoder is set on PQC_OK,
 * and NULL otherwise.
 *
 * Errors: PQC_INVALID_ARGUMENT  selection; its window_tokens is 0: a token attends to itself */
PQC_API pqc_status pqc_decoder_open(pqc_sequence* sequence, const pqc_selection* selection,
                                    pqc_decoder** decoder);
/* Closes the handle; a token that is not decoded in all layers is not stored. NULL does nothing. */
PQC_API void pqc_decoder_close(pqc_decoder* decoder);
/* Stores the rows of the next prefill tokens of a layer, keys [tokens, kv_heads, key_dim] and
 * values [tokens, kv_heads, value_dim], behind those that the sequence has.
 *
 * Errors: those of pqc_ingest, and PQC_FAILED_PRECONDITION (decoding has begun) */
PQC_API pqc_status pqc_decoder_prefill(pqc_decoder* decoder, uint32_t layer, const pqc_tensor* keys,
                                       const pqc_tensor* values);
/* pqc_decoder_prefill that also names tokens (NULL = none). Names need to be given with one layer
 * only. */
PQC_API pqc_status pqc_decoder_prefill_with(pqc_decoder* decoder, uint32_t layer,
                                            const pqc_tensor* keys, const pqc_tensor* values,
                                            const pqc_row_options* options);
/* Decodes the next token in one layer: query [query_heads, key_dim], key [kv_heads, key_dim], value
 * [kv_heads, value_dim], in host memory; output [query_heads, value_dim], with room for
 * `output_capacity` elements: the attention over sink, selected tokens and window, the token itself
 * included. Layers are called in ascending order; the last one ends the token. The first token that
 * has anything to select builds the index, if the sequence lacks it.
 *
 * After an error the token starts again with the first layer.
 *
 * Errors: PQC_INVALID_ARGUMENT  another layer is next (the message names it); shapes
 *         PQC_OUT_OF_RANGE      output_capacity
 *         and those of pqc_build_index, pqc_step_begin, pqc_step_attend and pqc_step_end */
PQC_API pqc_status pqc_decoder_decode(pqc_decoder* decoder, uint32_t layer, const pqc_tensor* query,
                                      const pqc_tensor* key, const pqc_tensor* value, float* output,
                                      uint64_t output_capacity);
/* pqc_decoder_decode that also names tokens (NULL = none), as pqc_step_end_with: names that a
 * layer's
 * call gives replace those of the token's earlier layers, and are recorded with the token's rows.
 * */
PQC_API pqc_status pqc_decoder_decode_with(pqc_decoder* decoder, uint32_t layer,
                                           const pqc_tensor* query, const pqc_tensor* key,
                                           const pqc_tensor* value, const pqc_row_options* options,
                                           float* output, uint64_t output_capacity);

#ifdef __cplusplus
}
#endif

#include "pqcached/pages.h"
#include "pqcached/positions.h"

#endif /* PQCACHED_STEP_H_ */

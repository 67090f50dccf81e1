/* pqcached client: complete attention in decode steps, for engines that keep no window. client.h
 * does not include this header.
 *
 * Per layer, pqc_step_decode takes the queries, keys and values of a step's new tokens, and gives
 * the attention over sink, selected tokens and window, merged. The library keeps the rows of the
 * new tokens for pqc_step_end, and reads the rest of sink and window where they are: in the
 * sidecar's memory, or among the rows of earlier steps that are not stored yet.
 *
 * Example, one step of a batch; all layers are decoded, so that pqc_step_end takes no rows:
 *
 *     pqc_step* step = NULL;
 *     pqc_status status = pqc_step_begin(client, items, item_count, &options, &step);
 *     if (status != PQC_OK) return status;
 *     for (uint32_t layer = 0; layer < layer_count; ++layer) {
 *       project(layer, hidden, &queries, &keys, &values);
 *       status = pqc_step_decode(step, layer, &queries, &keys, &values, NULL, &attention);
 *       if (status != PQC_OK) {
 *         pqc_step_abandon(step);
 *         return status;
 *       }
 *       finish_layer(layer, &attention, hidden);
 *     }
 *     return pqc_step_end(step, NULL, 0, NULL);
 */
#ifndef PQCACHED_DECODE_H_
#define PQCACHED_DECODE_H_

#include "pqcached/client.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Computes the complete attention of a step's query tokens in one layer. queries: [query tokens of
 * all items, query_heads, key_dim]; keys: [query tokens of all items, kv_heads, key_dim] and
 * values: [.., value_dim], the rows of the same tokens, of any dtype, paged or not. In a step of
 * one token the first dimension may be left out. `selection` NULL = that of pqc_step_begin; its
 * window_tokens must be at least 1. out: as in pqc_step_attend; `lse` and `lse_tensor` may both be
 * NULL. out->counts: the number of retrieved tokens of each item, per kv head. Keys and values
 * count as rounded to the cache's dtype, like stored rows.
 *
 * Query token i of an item, at position p = query_position + i, attends to
 *
 *   the sink       [0, sink_tokens)
 *   the selection  of candidates that end where the window begins; the item's query tokens share
 *                  it, or each has its own (PQC_STEP_SELECT_PER_TOKEN)
 *   the window     [query_position + 1 - window_tokens, p]: its own last window_tokens tokens, and
 *                  the i tokens before those, which no selection contains
 *
 * without the excluded ranges, and to no token behind p. With a selection of all candidates this is
 * full causal attention. An item without tokens between sink and window needs no index. Output is 0
 * and lse -inf for a token whose tokens are all excluded.
 *
 * In a layer of kind PQC_LAYERS_FULL, a query token attends to all tokens up to itself. In one of
 * kind PQC_LAYERS_WINDOW it attends to [p + 1 - window_tokens, p] with the window_tokens of the
 * layer, without a sink and a selection. Excluded ranges are left out in both.
 *
 * Each layer is decoded at most once in a step, in any order. pqc_step_end must not list a decoded
 * layer, and takes the rows of all other stored layers; NULL and 0 if there is none. A call that
 * fails keeps no row, and may be repeated. Results may be used only after pqc_step_end has returned
 * PQC_OK. On the local path the call makes no RPC; on the remote path it makes one or two.
 *
 * In a step on a GPU, all tensors are on the device, and the call returns when the work is
 * launched: see pqc_gpu_step_begin for what differs.
 *
 * Errors: PQC_INVALID_ARGUMENT     layer (also one that was decoded in this step), queries, keys,
 *                                  values (shape; NaN or infinity, also after the rounding),
 *                                  selection
 *         PQC_OUT_OF_RANGE         out.output_capacity, out.lse_capacity
 *         PQC_FAILED_PRECONDITION  a step on a GPU without PQC_STEP_DECODES; an attention that was
 *                                  begun and not waited for
 *         PQC_UNIMPLEMENTED        on a GPU: selection; keys with a block table, or with dims that
 *                                  are not contiguous
 *         the pending error of an earlier step's rows, as in pqc_step_begin
 *         and those of pqc_step_topk */
PQC_API pqc_status pqc_step_decode(pqc_step* step, uint32_t layer, const pqc_tensor* queries,
                                   const pqc_tensor* keys, const pqc_tensor* values,
                                   const pqc_selection* selection, pqc_step_attention* out);

#ifdef __cplusplus
}
#endif

#endif /* PQCACHED_DECODE_H_ */

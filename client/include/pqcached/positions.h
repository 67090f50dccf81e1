/* pqcached client: steps that attend to positions which another indexer has selected, for natively
 * sparse models. A part of step.h, which includes it.
 *
 * Example, one position of one sequence, whose model has selected 2048 tokens for all kv heads:
 *
 *     pqc_position_lists lists = PQC_INIT(pqc_position_lists);
 *     lists.positions = selected;  // [2048]: positions, then -1
 *     lists.list_count = 1;
 *     lists.capacity = 2048;
 *     pqc_step_attention attention = PQC_INIT(pqc_step_attention);
 *     attention.output = output;  // [query_heads, value_dim]
 *     attention.output_capacity = 32 * 128;
 *     attention.lse = lse;  // [query_heads]
 *     attention.lse_capacity = 32;
 *     status = pqc_step_attend_positions(step, 0, query, &lists, &attention);
 */
/* Before the guard: step.h includes this header at its end, with the types that it needs. */
#include "pqcached/step.h"

#ifndef PQCACHED_POSITIONS_H_
#define PQCACHED_POSITIONS_H_

#ifdef __cplusplus
extern "C" {
#endif

/* Positions of each item of a step, in lists. Positions are below 2^30, so that a list of uint32
 * whose padding is 0xffffffff has the same bytes. */
typedef struct pqc_position_lists {
  size_t struct_size;
  const int32_t* positions; /* [items, list_count, capacity]; may be NULL when capacity is 0 */
  uint32_t list_count;      /* lists of an item: 1 for all heads of the layer, one for each kv head,
                               or one for each query head */
  uint32_t capacity;        /* elements of a list, padding included */
  const uint32_t*
      lengths; /* [items, list_count]: positions of each list, at most `capacity`; NULL =
                               a list ends before its first -1, or at `capacity` */
  /* [query tokens of all items, query_heads, capacity], in place of the queries: scaled and
   * softcapped logits of the positions, of any dtype. NULL = from the stored keys. */
  const pqc_tensor* logits;
} pqc_position_lists;

/* Attends to the rows at the positions of each item in one layer, with exact logits: a partial
 * attention as that of pqc_step_attend, whose `queries` and `out` it has. Needs no index and no
 * selection. All query tokens of an item attend to all positions of its lists, which are below the
 * item's query_position: the engine attends to the step's own tokens itself. Waits until the rows
 * are stored. Results may be used only after pqc_step_end has returned PQC_OK.
 *
 * A list may be empty, and may have any order. A position that it repeats counts once. Ascending
 * lists are read in place; others are copied and sorted. out->counts [items]: the number of
 * different positions in the item's longest list.
 *
 * With lists->logits, only the values are read, each row once for all query heads of its kv head,
 * and `queries` may be NULL: for an engine that keeps the keys itself (KCache, arXiv 2404.18057,
 * section 3). Element j of a query head's logits is that of element j of its list, which must be
 * ascending. A logit of -infinity leaves the position out for that query head, so that a list may
 * be the union of what the heads of a group have selected. With a list for each query head, a row
 * is read once for each query head that lists it. The weights are normalised over the list. For the
 * weights of a softmax over all keys of the engine, without renormalisation, multiply the output of
 * each query head by exp(lse - lse_all), and continue with lse_all, which is the log-sum-exp of the
 * head's logits over all keys that the engine does not attend to itself.
 *
 * In a step on a GPU, lists->positions, lists->lengths and lists->logits are device memory, and the
 * call returns when the work is launched: see pqc_gpu_step_begin for what differs. Logits are not
 * checked there: one that is NaN makes the output of its query head unspecified, and +infinity
 * counts as the largest float.
 *
 * Errors: PQC_INVALID_ARGUMENT     layer, queries; lists.list_count, lists.lengths[j];
 *                                  lists.positions[j]: element j of the array is negative, or not
 *                                  below the query_position of its item, or with lists.logits not
 *                                  above the position before it; lists.logits; items[i].logits: a
 *                                  logit is NaN or +infinity
 *         PQC_OUT_OF_RANGE         out.output_capacity, out.lse_capacity; on a GPU lists.capacity
 *         PQC_FAILED_PRECONDITION  an attention that was begun and not waited for; layer: it is of
 *                                  kind PQC_LAYERS_VALUES, and there are no lists.logits
 *         PQC_UNIMPLEMENTED        out.counts, and lists per query head, in a step on a GPU;
 *                                  lists.logits on the remote path with a libpqcached_rpc or a
 *                                  sidecar of an earlier release; lists per query head on the
 *                                  remote path with a sidecar of an earlier release
 *         and those of pqc_step_topk but for the index's */
PQC_API pqc_status pqc_step_attend_positions(pqc_step* step, uint32_t layer,
                                             const pqc_tensor* queries,
                                             const pqc_position_lists* lists,
                                             pqc_step_attention* out);

#ifdef __cplusplus
}
#endif

#endif /* PQCACHED_POSITIONS_H_ */

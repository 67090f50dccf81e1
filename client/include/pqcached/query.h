/* pqcached client: calls that read a sequence: selection, scores, rows, attention. Included by
 * client.h.
 *
 * These calls read: they may run concurrently with each other and with calls that change the
 * sequence. They see the rows that were stored when they began. Further errors of all of them:
 * PQC_INVALID_ARGUMENT (a field and its limit), PQC_OUT_OF_RANGE (tokens that are not stored: write
 * them first), PQC_ABORTED (the sequence was truncated during the call: repeat). *
 * Example, which asks for the positions of the selected tokens of one layer:
 *
 *     pqc_positions best = PQC_INIT(pqc_positions);
 *     best.positions = positions;  // room for [kv_heads, k]
 *     best.capacity = capacity;
 *     pqc_status status = pqc_topk(sequence, query, selection, &best);
 *     if (status == PQC_OUT_OF_RANGE) {
 *       // best.kv_heads * best.count elements are needed.
 *     }
 */
/* Before the guard: client.h includes this header at its end, with the types that it needs. */
#include "pqcached/client.h"

#ifndef PQCACHED_QUERY_H_
#define PQCACHED_QUERY_H_

#ifdef __cplusplus
extern "C" {
#endif

/* GQA head aggregation: the rule by which the query heads of one kv head agree on one set of
 * tokens. The paper selects per head and leaves this open; its published code has the sum of
 * softmax. */
typedef enum pqc_group_rule {
  PQC_SUM_SOFTMAX = 0, /* default: sum over the query heads of the softmax over all candidates */
  PQC_MAX_SOFTMAX = 1, /* maximum over the query heads of the softmax over all candidates */
  PQC_MEAN_LOGIT = 2,  /* mean over the query heads of the logits */
  PQC_MAX_LOGIT = 3,   /* maximum over the query heads of the logits */
  /* A set of its own for each query head, by its logits; the tokens of a speculation share it, by
   * the sum of their softmax. Where results are per kv head, they are then per query head: k rows
   * are read for each. PQC_UNIMPLEMENTED for pages and in steps of a GPU. */
  PQC_PER_QUERY_HEAD = 4
} pqc_group_rule;

/* Absolute token positions [begin, end). */
typedef struct pqc_token_range {
  uint64_t begin;
  uint64_t end;
} pqc_token_range;

typedef enum pqc_budget_kind {
  PQC_BUDGET_RATIO = 0,
  PQC_BUDGET_COUNT = 1,
  PQC_BUDGET_MASS = 2, /* attention_mass of pqc_selection */
  PQC_BUDGET_RETRIEVED = 3
} pqc_budget_kind;

/* Terms of a selection. With n = query_position + 1 tokens of context, the engine itself attends to
 * the sink [0, sink_tokens) and the window [n - window_tokens, n) (initial and local tokens in the
 * paper, section 3.4). The candidates are the tokens between them, without the excluded ranges; the
 * k best are selected. A ratio and a count include all three: k = budget - sink - window tokens, at
 * least 0 and at most the candidates. A ratio of 0.1 of 4096 tokens with a sink of 16 and a window
 * of 64 selects floor(409.6) - 80 = 329 tokens. PQC_BUDGET_RETRIEVED is k itself, PQC_BUDGET_MASS
 * finds it. A budget that includes all candidates is exact attention: nothing is scored. Layers of
 * other kinds than PQC_LAYERS_SELECTED ignore index and budget (pqc_layer_kind); in a layer of kind
 * PQC_LAYERS_WINDOW, the counts of sink and window are 0 as well. */
typedef struct pqc_selection {
  size_t struct_size;
  pqc_index index;
  pqc_group_rule group_rule;
  uint64_t sink_tokens;
  uint64_t window_tokens;
  /* Masked tokens, neither attended nor counted: ascending, disjoint, not empty. */
  const pqc_token_range* excluded;
  uint32_t excluded_count; /* at most 16 */
  pqc_budget_kind budget;
  double ratio; /* PQC_BUDGET_RATIO: in (0, 1], of n, rounded down to tokens */
  /* PQC_BUDGET_COUNT: in [sink + window + 1, all tokens that may be attended].
   * PQC_BUDGET_RETRIEVED: k, at least 1; all candidates when there are fewer. */
  uint64_t token_count;
  /* Exact re-ranking: the index proposes ceil(rerank_factor x k) candidates, whose keys are scored
   * exactly, and the k best of these are selected; softmax rules are normalised over the proposed
   * ones. In [1, 8]; 0 = 1 = off. It costs rerank_factor x k reads of keys on the host. Without an
   * effect under PQC_INDEX_FLAT and in layers that are not PQC_LAYERS_SELECTED. PQC_UNIMPLEMENTED
   * for pages, in steps of a GPU, and when a call reaches an older sidecar or libpqcached_rpc. */
  double rerank_factor;
  /* PQC_BUDGET_MASS: the share of the attention, in (0, 1], that sink, window and selected tokens
   * are to have. k is the smallest number for which they have it by estimate, in the mean over the
   * query heads of a set and in every set, within [least_tokens, most_tokens] and the candidates.
   * The index estimates the logits of all candidates; those of sink and window are exact, as far as
   * these rows are stored when the call comes (others count as nothing, which makes k larger than
   * needed). 1 is most_tokens; shares above 0.9999 depend on rounding. All candidates are scored,
   * which takes several times as long as a selection by codes.
   * PQC_UNIMPLEMENTED for pages, in steps of a GPU, for the positions of several tokens with
   * PQC_STEP_SELECT_PER_TOKEN, and when a call reaches an older sidecar or libpqcached_rpc. */
  double attention_mass;
  uint64_t least_tokens; /* PQC_BUDGET_MASS: of k */
  uint64_t most_tokens;  /* PQC_BUDGET_MASS: of k; 0: all candidates */
  /* 1: attention also estimates the candidates that are not selected, by one more partial attention
   * (RetroInfer, arXiv 2505.02922, section 4.1): each cluster of an index PQC_INDEX_CLUSTERS counts
   * as its tokens that are not selected, all with the mean of the cluster's keys and values. Rows
   * without clusters stay left out: the sinks of a build, what a truncation has left of a segment
   * once unused memory is given back, and later rows (with a live index of any type: those of the
   * last, open segment; otherwise all until the next build). It costs
   * about as much as the attention to a 32nd of the candidates. The sequence needs such an index,
   * and that of the selection (PQC_FAILED_PRECONDITION). Without an effect where only positions are
   * asked for, and in layers that are not PQC_LAYERS_SELECTED.
   * PQC_UNIMPLEMENTED for pages, in steps of a GPU, and when a call reaches an older sidecar or
   * libpqcached_rpc. 0: off. */
  uint32_t tail_estimate;
  uint32_t reserved;
} pqc_selection;

/* A query of one layer. queries: [query_length, query_heads, key_dim] or, for one token,
 * [query_heads, key_dim], of any dtype. The tokens of a speculation (query_length 2..8) share one
 * selection, over the group's heads of all of them: group size x query_length is at most 64 (a
 * query of 32 heads over 8 kv heads has groups of 4). Its candidates end where the window of the
 * first of them begins, so that token i is to attend to the window from
 * query_position + 1 - window_tokens to its own position, which are i tokens more. */
typedef struct pqc_query {
  size_t struct_size;
  uint32_t layer;
  uint64_t query_position; /* absolute position of the first query token */
  pqc_tensor queries;
} pqc_query;

/* positions[kv_head * count + i], ascending per kv head. */
typedef struct pqc_positions {
  size_t struct_size;
  uint32_t* positions;    /* [kv_heads, count]; NULL asks for the counts only */
  uint64_t capacity;      /* of `positions`, in elements */
  uint32_t kv_heads;      /* out; with PQC_PER_QUERY_HEAD the query_heads */
  uint32_t count;         /* out: k, per kv head */
  uint64_t sink_tokens;   /* out: sink tokens that the engine attends itself */
  uint64_t window_tokens; /* out: window tokens that the engine attends itself */
} pqc_positions;

/* Selects the k best tokens for a query. Scores are, per query head, the sum over the sub-spaces of
 * the query's inner product with the key's centroid (paper, section 3.1, step 4), or exact inner
 * products (flat); `selection->group_rule` joins the heads of a kv head. The counts of *out are
 * also set on PQC_OUT_OF_RANGE for a too small capacity.
 *
 * Errors: PQC_FAILED_PRECONDITION  the sequence has no such index: pqc_build_index
 *         PQC_ABORTED              the layer's index is being built: repeat later
 *         PQC_OUT_OF_RANGE         candidates that are not stored yet; capacity
 *         PQC_UNIMPLEMENTED        a field of `selection` with an older sidecar or library */
PQC_API pqc_status pqc_topk(pqc_sequence* sequence, const pqc_query* query,
                            const pqc_selection* selection, pqc_positions* out);

/* Computes the logits of the tokens of a range under an index (NULL = the cache's default): logits
 * [query_heads, tokens], scaled and softcapped, with room for `logit_capacity` elements; max
 * [query_heads], the largest logit, and sum_exp [query_heads], the sum of exp(logit - max). Each of
 * the three may be NULL. For one query token; query_position has no effect.
 *
 * Errors: those of pqc_topk; PQC_OUT_OF_RANGE: tokens, logit_capacity */
PQC_API pqc_status pqc_score(pqc_sequence* sequence, const pqc_query* query, const pqc_index* index,
                             pqc_token_range tokens, float* logits, uint64_t logit_capacity,
                             float* max, float* sum_exp);

/* The part of a row: [key, value], its key, or its value. */
typedef enum pqc_row_part { PQC_ROW = 0, PQC_KEY = 1, PQC_VALUE = 2 } pqc_row_part;

/* Copies the rows of a token range (not empty) to `out`, [kv_heads, tokens, dim] of the cache's
 * dtype, where dim is key_dim + value_dim, key_dim or value_dim, as `part` says. out_bytes: room of
 * `out`.
 *
 * Errors: PQC_OUT_OF_RANGE  out_bytes; tokens that are not stored
 *         PQC_ABORTED       on the remote path, rows of the sequence were removed between the parts
 *                           of a large answer: repeat the call */
PQC_API pqc_status pqc_fetch_blocks(pqc_sequence* sequence, uint32_t layer, pqc_token_range tokens,
                                    pqc_row_part part, void* out, uint64_t out_bytes);
/* Copies rows by position: positions [kv_heads, count], in any order; out [kv_heads, count, dim],
 * as pqc_fetch_blocks. count: 1 to 2^30, per kv head. Sets of k per query head are one list of
 * group size x k positions per kv head. Errors: as pqc_fetch_blocks. */
PQC_API pqc_status pqc_fetch_tokens(pqc_sequence* sequence, uint32_t layer,
                                    const uint32_t* positions, uint32_t count, pqc_row_part part,
                                    void* out, uint64_t out_bytes);

/* Logarithm of log-sum-exps: natural, or base 2 (log2 of the same sum), as some kernels have it. */
typedef enum pqc_log_base { PQC_LOG_NATURAL = 0, PQC_LOG_BASE2 = 1 } pqc_log_base;

/* Result of an attention over the selected tokens only; pqc_merge adds the engine's own part over
 * sink and window. Output and lse are either contiguous floats or tensors of the engine's, of any
 * dtype and strides; values are rounded to the dtype, to nearest even. */
typedef struct pqc_attention {
  size_t struct_size;
  /* [query_length, query_heads, value_dim]; 0 where nothing was selected. */
  float* output;
  uint64_t output_capacity; /* of `output`, in elements */
  /* [query_length, query_heads]: log of the sum of exp(scaled logits); -inf where nothing was
   * selected. */
  float* lse;
  uint64_t lse_capacity;  /* of `lse`, in elements */
  pqc_positions selected; /* out; positions only when selected.positions is given */
  /* In place of `output`, which must then be NULL: [query_length, query_heads, value_dim], or
   * [query_heads, value_dim] for one token. */
  const pqc_tensor* output_tensor;
  /* In place of `lse`, which must then be NULL: [query_length, query_heads], or [query_heads] for
   * one token. Memory in the order [query_heads, query_length] has strides {1, query_length}. */
  const pqc_tensor* lse_tensor;
  pqc_log_base lse_base; /* of `lse` and `lse_tensor` */
} pqc_attention;

/* Selects as pqc_topk, and attends to the selected tokens: output = sum of softmax(logits) x
 * values with exact logits, whatever index selected them. On the local path in this process.
 *
 * Errors: those of pqc_topk; PQC_OUT_OF_RANGE: output_capacity, lse_capacity,
 * selected.capacity */
PQC_API pqc_status pqc_attend(pqc_sequence* sequence, const pqc_query* query,
                              const pqc_selection* selection, pqc_attention* out);
/* Attends to given positions, [kv_heads, count] and ascending per kv head, count at least 1. Needs
 * no index; query_position has no effect.
 *
 * Errors: PQC_INVALID_ARGUMENT  positions that do not ascend
 *         PQC_OUT_OF_RANGE      positions that are not stored; capacities */
PQC_API pqc_status pqc_attend_positions(pqc_sequence* sequence, const pqc_query* query,
                                        const uint32_t* positions, uint32_t count,
                                        pqc_attention* out);

/* Attends to all stored rows of the range `tokens` (may be empty), causally: query token i, at
 * query_position + i, attends to the positions up to its own, so that rows before the query are
 * seen by all its tokens. queries: [tokens, query_heads, key_dim] of 1 to 8192 tokens. Exact,
 * without an index: prefill of a chunk over a stored prefix, layers that attend to everything, and
 * decoding without a selection. out->selected.count is the number of rows of the range; its
 * positions must be NULL. Output is 0 and lse -inf for a query token that sees no row. On the local
 * path in this process, on all threads of the client; elsewhere in several RPCs when the query is
 * long.
 *
 * Errors: PQC_INVALID_ARGUMENT  out.selected.positions is not NULL
 *         PQC_OUT_OF_RANGE      tokens that are not stored; capacities */
PQC_API pqc_status pqc_attend_range(pqc_sequence* sequence, const pqc_query* query,
                                    pqc_token_range tokens, pqc_attention* out);

/* Merges the partial attention b into a, for `rows` queries of `dim` floats (output_*: [rows, dim],
 * lse_*: [rows]), over disjoint sets of tokens:
 *
 *   lse      = log(exp(lse_a) + exp(lse_b))
 *   output_a = exp(lse_a - lse) output_a + exp(lse_b - lse) output_b,   lse_a = lse
 *
 * A part with lse -inf does not count, and its output is not read. No client is needed;
 * thread-safe.
 *
 * Errors: PQC_INVALID_ARGUMENT  a NULL pointer */
PQC_API pqc_status pqc_merge(uint32_t rows, uint32_t dim, float* output_a, float* lse_a,
                             const float* output_b, const float* lse_b);

/* A partial attention in tensors of any dtype and strides. */
typedef struct pqc_partial {
  size_t struct_size;
  pqc_tensor output; /* [tokens, heads, dim] */
  pqc_tensor lse;    /* [tokens, heads] */
  pqc_log_base lse_base;
  /* Learned attention sinks of a model, [heads] natural logits of any dtype, or NULL. For `a` only;
   * see pqc_merge_tensors. */
  const pqc_tensor* sink_logits;
} pqc_partial;

/* Merges b into a like pqc_merge, for partial attentions of the same shape. Computes in fp32; a's
 * results are rounded to the dtypes of its tensors. No client is needed; thread-safe. Merges of
 * tensors on a GPU: pqc_gpu_merge_tensors (gpu.h).
 *
 * With a->sink_logits, the softmax of query head h has one more term, exp(sink_logits[h]), without
 * a value:
 *
 *   lse      = log(exp(lse_a) + exp(lse_b) + exp(sink_logits[h]))
 *   output_a = exp(lse_a - lse) output_a + exp(lse_b - lse) output_b,   lse_a = lse
 *
 * A logit of -inf adds nothing. Of several merges, exactly one has the sinks.
 *
 * Errors: PQC_INVALID_ARGUMENT  a tensor and what is wrong with it ("b.lse.shape") */
PQC_API pqc_status pqc_merge_tensors(const pqc_partial* a, const pqc_partial* b);

#ifdef __cplusplus
}
#endif

#endif /* PQCACHED_QUERY_H_ */

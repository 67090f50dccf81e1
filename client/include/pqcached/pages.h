/* pqcached client: steps that select engine pages, for engines whose kernels attend to whole pages
 * of the engine's own KV cache. A part of step.h, which includes it.
 *
 * Example, one list of pages of 16 tokens for all kv heads, with those of sink and window:
 *
 *     pqc_page_options options = PQC_INIT(pqc_page_options);
 *     options.page_tokens = 16;
 *     options.heads = PQC_HEADS_SUM;
 *     options.flags = PQC_PAGES_WITH_SINK | PQC_PAGES_WITH_WINDOW;
 *     uint32_t length = 0;
 *     pqc_step_pages selected = PQC_INIT(pqc_step_pages);
 *     selected.pages = pages;  // [512]
 *     selected.capacity = 512;
 *     selected.lengths = &length;
 *     status = pqc_step_topk_pages(step, 0, query, NULL, &options, &selected);
 */
/* Before the guard: step.h includes this header at its end, with the types that it needs. */
#include "pqcached/step.h"

#ifndef PQCACHED_PAGES_H_
#define PQCACHED_PAGES_H_

#ifdef __cplusplus
extern "C" {
#endif

/* The lists of pages of an item. */
typedef enum pqc_head_rule {
  PQC_HEADS_EACH = 0, /* one for each kv head, by that head's scores */
  PQC_HEADS_MAX = 1,  /* one, by the maximum of a token's scores over the kv heads */
  PQC_HEADS_SUM = 2   /* one, by the sum of a token's scores over the kv heads */
} pqc_head_rule;

/* Pages that are in every list, before those that are selected by score. */
typedef enum pqc_page_flag {
  PQC_PAGES_WITH_SINK = 1,  /* pages that hold a sink token */
  PQC_PAGES_WITH_WINDOW = 2 /* pages that hold a window token, the step's own tokens included */
} pqc_page_flag;

typedef struct pqc_page_options {
  size_t struct_size;
  uint32_t page_tokens; /* 16, 32 or 64 */
  pqc_head_rule heads;
  uint64_t flags; /* a sum of pqc_page_flag */
} pqc_page_options;

/* Page n holds the tokens [n page_tokens, (n + 1) page_tokens) of its sequence, and is entry n of
 * the sequence's block table. All lists of an item have the same length. */
typedef struct pqc_step_pages {
  size_t struct_size;
  int32_t* pages;      /* [items, list_count, capacity]: each list ascending, then -1; NULL asks for
                          the other fields only */
  uint32_t capacity;   /* pages of a list */
  uint32_t list_count; /* out: kv_heads of the layer, or 1 */
  uint32_t* lengths;   /* [items], out: pages in each list of an item; on the device, as `pages`, in
                          a step on a GPU */
  uint32_t needed;     /* out: the largest length, which is the capacity that is needed */
} pqc_step_pages;

/* Selects pages for each item in one layer; queries and `selection` as in pqc_step_topk.
 *
 * The candidates are those of the selection: tokens between sink and window, not excluded. A
 * token's score under a kv head is the number by which selection->group_rule compares tokens: the
 * sum of softmax weights (PQC_SUM_SOFTMAX), the logarithm of the largest softmax weight
 * (PQC_MAX_SOFTMAX), the sum of the logits (PQC_MEAN_LOGIT), or the largest logit (PQC_MAX_LOGIT).
 * options->heads joins the kv heads. A page's score is the maximum of its candidates' scores. The k
 * tokens of the selection's budget become k / page_tokens pages, rounded up; all pages with a
 * candidate, when k is all candidates. The pages with the largest scores are selected, and of equal
 * ones those with the lowest numbers.
 *
 * Without flags a list has only these pages. They may hold tokens of sink and window, and excluded
 * tokens; the engine masks what it attends to by itself. With a flag, the pages of sink or window
 * are in every list, count towards its length and not towards the budget, and are not selected
 * again. A page whose sink, window and candidate tokens are all excluded is in no list.
 *
 * On the local path in this process. On the remote path one RPC selects in the sidecar for up to
 * 256 items, and its answer has only the lists.
 *
 * In a step on a GPU queries, out->pages and out->lengths are device memory, and the call returns
 * when the work is launched; list_count and needed are host memory, and filled at once. `selection`
 * is NULL, and the layer is of kind PQC_LAYERS_SELECTED. The pages are those of a step on the CPU,
 * but for a page whose score rounds otherwise. With out->pages NULL lengths is not written. The
 * call may be captured in a graph (gpu.h), which keeps the addresses, the capacity and the options
 * of its capture, and lists the pages of the step in which it is replayed. Where an item has more
 * pages than the capacity then, the first ones are written, and pqc_step_end returns
 * PQC_OUT_OF_RANGE.
 *
 * Errors: PQC_INVALID_ARGUMENT     layer, queries, selection, options.page_tokens, options.heads,
 *                                  out.lengths; in a step on a GPU a pointer that is not the
 *                                  device's
 *         PQC_UNIMPLEMENTED        options.flags: unknown ones; a step with
 *                                  PQC_STEP_SELECT_PER_TOKEN; on the remote path a sidecar or
 *                                  libpqcached_rpc of an earlier release; in a step on a GPU
 *                                  `selection`, and a layer of another kind
 *         PQC_OUT_OF_RANGE         out.capacity; *out says how much is needed
 *         PQC_FAILED_PRECONDITION  an attention that was begun and not waited for; no such index
 *         and those of pqc_step_topk */
PQC_API pqc_status pqc_step_topk_pages(pqc_step* step, uint32_t layer, const pqc_tensor* queries,
                                       const pqc_selection* selection,
                                       const pqc_page_options* options, pqc_step_pages* out);

#ifdef __cplusplus
}
#endif

#endif /* PQCACHED_PAGES_H_ */

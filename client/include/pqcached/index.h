/* pqcached client: indexes by name, and their builds. A part of client.h, which includes it and
 * whose conventions hold.
 *
 * Example, which ends a build that the engine does not need any more:
 *
 *     static int goes_on(void* context, const pqc_build_progress* progress) {
 *       const engine_request* request = (const engine_request*)context;
 *       return !request->is_cancelled || progress->layers_done == progress->layer_count;
 *     }
 *
 *     static pqc_status build(pqc_sequence* sequence, engine_request* request) {
 *       pqc_build_options options = PQC_INIT(pqc_build_options);
 *       options.sink_tokens = 16;
 *       options.callback = goes_on;
 *       options.callback_context = request;
 *       return pqc_build_index(sequence, &options);
 *     }
 */
/* Before the guard: client.h includes this header at its end, with the types that it needs. */
#include "pqcached/client.h"

#ifndef PQCACHED_INDEX_H_
#define PQCACHED_INDEX_H_

#ifdef __cplusplus
extern "C" {
#endif

/* A parameter of an index type by name. pqc_admin_json(client, "ListIndexTypes", "{}", &answer)
 * returns the types that the sidecar has, with their parameters, defaults and limits. */
typedef struct pqc_index_parameter {
  size_t struct_size;
  const char* name;
  const char* value_name; /* one of the parameter's names, such as "pairs"; NULL: `number` */
  uint64_t number;
} pqc_index_parameter;

/* Makes an index of a type by name: "pq" with subspaces 4 and bits 8. Parameters that are not given
 * have their defaults. No RPC. The limits that depend on a key are checked by the calls that the
 * index is for. `parameters` may be NULL when the count is 0.
 *
 * Errors: PQC_INVALID_ARGUMENT  type: there is no such type; parameters[NAME]: the type has no such
 *                               parameter, its description does not allow the value, or it is given
 *                               twice */
PQC_API pqc_status pqc_index_make(const char* type, const pqc_index_parameter* parameters,
                                  uint32_t parameter_count, pqc_index* index);

/* Makes an index of a type of the client's sidecar, which may be one of its plug-ins (kind
 * PQC_INDEX_PLUGIN), by the description that the sidecar gives of it: one RPC, none for the types
 * that pqc_index_make knows. The index is the same with every sidecar that has the plug-in.
 *
 * Errors: those of pqc_index_make; and
 *         PQC_UNIMPLEMENTED  a sidecar or libpqcached_rpc of an earlier release */
PQC_API pqc_status pqc_client_index_make(pqc_client* client, const char* type,
                                         const pqc_index_parameter* parameters,
                                         uint32_t parameter_count, pqc_index* index);

/* Progress of a build after one codebook of one layer. */
typedef struct pqc_build_progress {
  size_t struct_size;
  uint32_t layer;
  uint32_t layers_done;
  uint32_t layer_count;
  uint32_t codebook_generation; /* a long sequence has several */
  uint32_t codebook_generation_count;
  uint32_t iterations;     /* k-means iterations done for this codebook */
  double inertia;          /* mean squared distance of the trained keys to their centroids */
  double seconds;          /* since the build began */
  uint64_t index_bytes;    /* codes and counts of this layer so far */
  uint64_t codebook_bytes; /* centroids of this layer so far */
} pqc_build_progress;

/* Returns nonzero to continue, 0 to cancel. After the last layer it is too late to cancel. Called
 * on the thread that called pqc_build_index. */
typedef int (*pqc_build_callback)(void* context, const pqc_build_progress* progress);

typedef struct pqc_build_options {
  size_t struct_size;
  pqc_index index; /* or the cache's default; not flat, which needs no build */
  /* Iterations of k-means, at most 1000; 0 = as many as fit into the engine's prefill of the tokens
   * (pqc_cache_spec.prefill_seconds), at most 10, and 10 when its time is not known. */
  uint32_t iterations;
  uint64_t seed;               /* same rows, iterations (not 0) and seed: same index */
  uint64_t train_tokens;       /* sample per generation and kv head; 0 = all */
  uint64_t sink_tokens;        /* first tokens that are not trained on */
  uint32_t timeout_ms;         /* 0 = the longest that the sidecar allows (its max_timeout) */
  pqc_build_callback callback; /* may be NULL */
  void* callback_context;
  /* 1: replaces an index that exists when the new one is done. Steps use the earlier one until then
   * (of other clients with mapped memory, until the next row), and keep it when the build fails.
   * 0: PQC_ALREADY_EXISTS */
  uint32_t rebuild;
  /* Conditions of `rebuild`, of which one that is met suffices, else PQC_ALREADY_EXISTS; 0 = no
   * condition of this kind, and with none at all it is always done. The first is met if the keys
   * of a segment in a layer are farther from their centroids than this times the keys that the
   * codebook was trained on (mean squared distances; 1.25 is what live indexes use). At most
   * 1000000. */
  double rebuild_drift;
  /* Met if the sequence has at least so many tokens that it did not have at the last build of the
   * index. Of an index that an earlier worker, or a build of another sequence, has built, and of a
   * live one that no call has built, all tokens count. */
  uint64_t rebuild_tokens;
} pqc_build_options;

/* Closes the prefill, trains the codebooks by k-means (paper, section 3.1, step 2) and codes the
 * rows of all layers. Returns when the index is complete. With a live index of the same kind it
 * waits until all rows are indexed, and iterations, seed and train_tokens have no effect, except
 * that a rebuild of a complete one uses them. During a build, steps go on (a flag of pqc_step_begin
 * lets them attend without the index), and rows are stored, which it codes at its end; a fork then
 * has no part of the index. A cancelled or failed build leaves no index, a rebuild the earlier one,
 * and the last segment stays closed; where the cancellation was too late, the new index exists
 * (pqc_sequence_describe: index_count, except for a rebuild).
 *
 * When the time runs out after every layer has a usable codebook, the build ends with fewer
 * iterations and returns PQC_OK.
 *
 * Errors: PQC_INVALID_ARGUMENT     a field of `options`
 *         PQC_FAILED_PRECONDITION  no tokens, or layers with different token counts (the message
 *                                  names the layer): ingest the missing rows first; or the cache
 *                                  has no layers of kind PQC_LAYERS_SELECTED: nothing to build
 *         PQC_ALREADY_EXISTS       the sequence has this index, and `rebuild` is 0 or no condition
 *                                  of it is met: nothing to do
 *         PQC_ABORTED              another build of this index, a cancelled one that has not ended
 *                                  yet included, or a call that changes the sequence: repeat later
 *         PQC_RESOURCE_EXHAUSTED   the pool is full (shortfall in bytes), or 4 indexes exist
 *         PQC_DEADLINE_EXCEEDED    before every layer had a codebook: repeat with more time
 *         PQC_CANCELLED            the callback returned 0
 *         PQC_UNIMPLEMENTED        options.rebuild with a sidecar of an earlier release */
PQC_API pqc_status pqc_build_index(pqc_sequence* sequence, const pqc_build_options* options);

#ifdef __cplusplus
}
#endif

#endif /* PQCACHED_INDEX_H_ */

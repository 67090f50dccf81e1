/* pqcached client: prefill and steps on a GPU. Conventions and status codes are client.h's.
 *
 * An engine on a GPU passes device pointers and a stream. Rows (KV entries) stay in the sidecar's
 * memory, which is page-locked and which the GPU reads in place; codes of the index, and the rows
 * that are selected most often (block cache; paper, section 3.4), are kept on the GPU. Only on the
 * local path.
 *
 *   pqc_gpu_open                     once per cache and device: reserves device memory by
 *                                    capacities
 *   pqc_gpu_ingest                   prefill, per chunk and layer: K and V on the device; returns
 *                                    at once
 *   pqc_load (load.h)                a stored prefix: copies its rows to the device; without a
 *                                    pqc_gpu, also on the remote path
 *   per step: pqc_gpu_step_begin     instead of pqc_step_begin: readiness, descriptors to the
 *                                    device
 *     per layer: pqc_step_attend     queries, output, lse on the device; returns at once
 *            or pqc_gpu_step_topk  positions and counts on the device, for engines with their own
 *                                    kernels
 *            or pqc_step_topk_pages  engine pages on the device, for kernels that attend to whole
 *                                    ones (pages.h)
 *            or pqc_step_attend_range   the same of all tokens of a range
 *            or pqc_step_attend_positions   the same of positions that the engine gives, on the
 *                                    device
 *            pqc_gpu_merge_tensors   adds the engine's own attention; returns at once
 *            or pqc_step_decode      the complete attention, with PQC_STEP_DECODES
 *     pqc_step_end                   waits for the stream's work of the step, then as on the CPU
 *   pqc_gpu_close
 *
 * Steps of one query length launch the same work, whatever sequences they have, where either all or
 * none of them have PQC_STEP_SELECT_PER_TOKEN, and likewise PQC_STEP_DECODES: an engine may capture
 * the calls between begin and end in a CUDA graph and replay it in later steps in place of the
 * calls, as long as its own tensors remain at their addresses, with room for the items of those
 * steps, and `generation` of pqc_gpu_counts has not changed. Begin and end are called outside of
 * the capture, in every step. A layer cannot be captured in a step that has launched it before:
 * warm up in another step. With codes_bytes, no layer of that step may have been launched before; a
 * graph copies the codes that its layers read, one layer ahead from its second layer on, and once a
 * capture was made, layers that are launched wait for their own copies.
 *
 * CUDA is used by libpqcached_gpu.so only, which pqc_gpu_open loads: this library does not need it.
 * Without a device, an engine uses the same calls with host memory (pqc_step_begin).
 *
 * Example, one position of one sequence, with all tensors on the device:
 *
 *     pqc_gpu_options gpu_options = PQC_INIT(pqc_gpu_options);
 *     gpu_options.token_capacity = 131072;
 *     pqc_gpu* gpu = NULL;
 *     pqc_status status = pqc_gpu_open(cache, &gpu_options, &gpu);
 *     if (status != PQC_OK) return status;  // no device: pqc_step_begin and host memory
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
 *     status = pqc_gpu_step_begin(gpu, &item, 1, &options, stream, &step);
 *
 *     pqc_step_attention attention = PQC_INIT(pqc_step_attention);
 *     attention.output = output;  // [query_heads, value_dim]
 *     attention.output_capacity = 32 * 128;
 *     attention.lse = lse;  // [query_heads]
 *     attention.lse_capacity = 32;
 *     if (status == PQC_OK) status = pqc_step_attend(step, 0, query, NULL, &attention);
 *     if (status == PQC_OK) {
 *       status = pqc_step_end(step, rows, 1, NULL);
 *     } else {
 *       pqc_step_abandon(step);
 *     }
 *     pqc_gpu_close(gpu);  // engines keep it
 */
#ifndef PQCACHED_GPU_H_
#define PQCACHED_GPU_H_

#include "pqcached/client.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct pqc_gpu pqc_gpu;

/* Replacement policy of the block cache. */
typedef enum pqc_gpu_policy {
  /* LFU over all blocks, cached or not; a new block has to be requested 1.25 times as often. */
  PQC_GPU_FREQUENCY = 0,
  PQC_GPU_LRU = 1, /* replaces the block that was requested longest ago */
  PQC_GPU_LFU = 2  /* replaces the block that is requested least; frequencies age */
} pqc_gpu_policy;

typedef struct pqc_gpu_options {
  size_t struct_size;
  int32_t device;               /* CUDA device number */
  uint32_t sequence_capacity;   /* sequences of a step; 0 = 8 */
  uint64_t token_capacity;      /* tokens of the longest sequence, 1 to 2^30; required */
  uint64_t selected_capacity;   /* largest k, and elements of a list of positions; 0 = 4096, or
                                   token_capacity if that is less */
  uint32_t query_length;        /* longest query of an item, in tokens; 0 = 1 */
  uint32_t segment_capacity;    /* segments of a sequence; 0 = token_capacity / 1024 + 64 */
  uint32_t codebook_capacity;   /* codebooks of a sequence; 0 = token_capacity / 32768 + 2 */
  uint32_t disable_block_cache; /* 1 = no block cache, and cache_tokens must be 0 */
  /* Tokens in the block cache, per kv head of a sequence; a multiple of 128; 0 = 4096. */
  uint32_t cache_tokens;
  /* Blocks of 128 rows loaded after a step, per kv head of a sequence; at most 128; 0 = 32. */
  uint32_t max_block_loads;
  pqc_gpu_policy policy;
  pqc_index index; /* pq index that steps select by; PQC_INDEX_DEFAULT = the cache's */
  /* NULL = libpqcached_gpu.so in the folder of this library, then the loader's search path. */
  const char* gpu_library_path;
  /* Device memory for the codes of the index, in bytes: 0 = the codes of all layers with an index,
   * otherwise at least those of two. The first ones stay on the device, as many as fit. The codes
   * of the other layers are kept page-locked on the host too, and copied one layer ahead in every
   * step, so layers should be called in ascending order. */
  uint64_t codes_bytes;
} pqc_gpu_options;

/* Reserves memory on the device for steps of the cache. *gpu is set on PQC_OK, and NULL otherwise.
 * The handle shares ownership of the cache, and is closed before its client is.
 *
 * The stored layers have one shape, and any kind with keys. In a layer of kind PQC_LAYERS_FULL,
 * pqc_step_attend attends to all candidates of the step's selection as pqc_step_attend_range does
 * to a range, also in graphs; in one of kind PQC_LAYERS_WINDOW to no tokens. A cache without layers
 * of kind PQC_LAYERS_SELECTED needs no index: `index` and codes_bytes have no effect then.
 *
 * Errors: PQC_INVALID_ARGUMENT     a field and its limit; no such device
 *         PQC_FAILED_PRECONDITION  libpqcached_gpu.so cannot be loaded or belongs to another
 *                                  release; no device, no driver, or one older than the CUDA
 *                                  runtime: compute on the CPU
 *         PQC_UNIMPLEMENTED        a device of an older architecture; the remote path; index flat;
 *                                  softcap; layers of different shapes: compute on the CPU
 *         PQC_RESOURCE_EXHAUSTED   device or page-locked memory (the message has the wanted bytes):
 *                                  smaller capacities */
PQC_API pqc_status pqc_gpu_open(pqc_cache* cache, const pqc_gpu_options* options, pqc_gpu** gpu);
/* Waits for the device, and closes the handle. No step on it may be in progress. NULL does
 * nothing. */
PQC_API void pqc_gpu_close(pqc_gpu* gpu);

typedef struct pqc_gpu_counts {
  size_t struct_size;
  uint64_t hits;         /* rows found in the block cache */
  uint64_t misses;       /* rows read from the sidecar's memory */
  uint64_t loaded;       /* blocks of 128 rows copied into the block cache */
  uint64_t evicted;      /* blocks replaced in the block cache */
  uint64_t device_bytes; /* reserved on the device */
  uint64_t locked_bytes; /* of the sidecar's memory, page-locked so far */
  uint64_t generation;   /* increases when a captured graph has to be captured again */
  /* 1: some rows cannot be page-locked; the host copies them during steps. */
  uint32_t has_staged_rows;
  /* Layers whose codes stay on the device; those of the other layers are copied in each step. */
  uint32_t resident_layers;
} pqc_gpu_counts;
/* Fills *counts with the counters as of the last step that ended, and waits for its updates of the
 * block cache. For status pages. May be called concurrently with steps and captures, on any thread.
 *
 * Errors: PQC_INTERNAL  the device reports an error */
PQC_API pqc_status pqc_gpu_count(pqc_gpu* gpu, pqc_gpu_counts* counts);

/* Prefill: pqc_ingest for keys [tokens, kv_heads, key_dim] and values [tokens, kv_heads, value_dim]
 * on the device (PQC_CUDA; or paged, with the block table's `blocks` on the host), with contiguous
 * dims. `stream` (a cudaStream_t) packs them into the page-locked staging ring, in the cache's
 * dtype where that has no more bytes; work that the stream receives later may overwrite K and V.
 * The call returns when the packing is launched. When the stream has finished it, a thread of the
 * client passes the rows to the sidecar, while the stream computes the next layer or chunk. While
 * all slots of the staging ring are in use (pqc_client_options), the call waits for one.
 *
 * An error that occurs later (the sidecar refuses rows) is returned by the next pqc_gpu_ingest for
 * the sequence, and by each call that waits for its rows: pqc_sequence_flush, pqc_build_index,
 * steps. Rows of the sequence that follow the refused ones are not stored until pqc_sequence_flush,
 * or a call that changes the sequence, has returned the error: then ingest again from the refused
 * ones on; rows that are stored already are acknowledged.
 *
 * The first call page-locks the staging ring. Calls may run concurrently with steps, and on several
 * threads for several sequences; not during a capture of `stream`.
 *
 * Errors: those of pqc_ingest, and
 *         PQC_INVALID_ARGUMENT    a pointer that is not the device's; a stream of another device,
 *                                 or one that captures
 *         PQC_UNIMPLEMENTED       dims that are not contiguous; a token that does not fit into a
 *                                 staging slot
 *         PQC_RESOURCE_EXHAUSTED  the ring cannot be page-locked: copy to the host, and call
 *                                 pqc_ingest
 *         PQC_DEADLINE_EXCEEDED   no slot in time: repeat, with the same positions */
PQC_API pqc_status pqc_gpu_ingest(pqc_gpu* gpu, pqc_sequence* sequence, uint32_t layer,
                                  uint64_t first_position, const pqc_tensor* keys,
                                  const pqc_tensor* values, void* stream);
/* pqc_gpu_ingest with options (NULL = none), which are copied: tokens are named when the rows of
 * the call are stored. Refused names are an error that occurs later. */
PQC_API pqc_status pqc_gpu_ingest_with(pqc_gpu* gpu, pqc_sequence* sequence, uint32_t layer,
                                       uint64_t first_position, const pqc_tensor* keys,
                                       const pqc_tensor* values, const pqc_row_options* options,
                                       void* stream);

/* pqc_add_query_samples for queries on the device (PQC_CUDA; or paged) with contiguous dims, which
 * `stream` packs into the staging ring. Waits until the stream has done so, and for one RPC. Calls
 * may run concurrently as those of pqc_gpu_ingest.
 *
 * Errors: those of pqc_add_query_samples and of pqc_gpu_ingest */
PQC_API pqc_status pqc_gpu_add_query_samples(pqc_gpu* gpu, pqc_sequence* sequence,
                                             const pqc_query_samples* samples,
                                             uint32_t sample_count, void* stream);

/* Begins a step whose tensors are on the device, as pqc_step_begin. options->selection holds for
 * all layers and calls; all items have the same query_length. `stream` is a cudaStream_t of the
 * device, which orders all work of the step. One step at a time on a pqc_gpu; steps of others, and
 * on the CPU, may run concurrently.
 *
 * A step reads the rows of each item that lie before its window, below query_position + 1 -
 * window_tokens, and waits for them when it begins. Without a selection (NULL) it reads all rows
 * below query_position, so it also waits until those of the step before are stored; it needs no
 * index, and takes the calls that need no selection.
 *
 * During the step pqc_step_attend takes queries with device PQC_CUDA (their `stream` NULL or the
 * step's) and device pointers output and lse, and returns when the work is launched; its counts are
 * host memory, and filled at once. pqc_step_end takes keys and values of host memory or, with
 * device PQC_CUDA, of the device; it waits for the work that the stream received in the step, so
 * call it where the engine waits for the step's tokens anyway. Results may be used only when it
 * returns PQC_OK.
 *
 * pqc_step_attend_positions takes queries or lists->logits, output and lse likewise, and lists that
 * an indexer of the engine has left on the device: lists->positions and lists->lengths are device
 * memory, and lists->capacity is at most selected_capacity. Only the device reads them. A position
 * that is negative, not among the rows that the step reads or, with logits, not above the one
 * before it is left out, as is what a length has beyond the capacity; pqc_step_end then returns
 * PQC_INVALID_ARGUMENT with the path of one such element.
 * out->counts must be NULL. A graph keeps the addresses, list_count and capacity of its capture,
 * and reads the contents of the lists at each replay.
 *
 * pqc_step_attend_range takes queries, output and lse likewise, and `ranges` in device memory,
 * among the rows that the step reads. A range that ends beyond these, or begins behind its end,
 * counts as empty; pqc_step_end then returns PQC_INVALID_ARGUMENT with its path. out->counts must
 * be NULL. The rows are attended to in parts of selected_capacity rows, and the block cache does
 * not count them as requests. A graph has as many parts as token_capacity rows need, most of them
 * empty where sequences are shorter, and reads the ranges at each replay.
 *
 * With PQC_STEP_SELECT_PER_TOKEN, pqc_step_attend, pqc_step_decode and pqc_gpu_step_topk launch the
 * work of one query token for each query token of an item.
 *
 * With PQC_STEP_DECODES, pqc_step_decode takes queries, keys, values, output and lse (or no lse)
 * likewise; keys and values have contiguous dims and no block table. The step has a selection, with
 * window_tokens of at least 1. Sink, window and query tokens of an item, and the window of a layer
 * of kind PQC_LAYERS_WINDOW with query_length - 1 tokens more, are at most selected_capacity
 * tokens. Rows of the window that are not stored yet are copied when the step begins, which waits
 * while they are more than those of 64 tokens. NaN or infinity in keys or values is an error of
 * pqc_step_end, which names the query token. A graph keeps the rows of the step in which it is
 * replayed: pqc_step_end lists none of the layers that it has decoded. Only steps with the flag may
 * replay it.
 *
 * Errors: those of pqc_step_begin, and
 *         PQC_INVALID_ARGUMENT    a selection with another index than pqc_gpu_open's; a stream of
 *                                 another device, or one that captures; more than the capacities of
 *                                 pqc_gpu_options
 *         PQC_UNIMPLEMENTED       items of different query_length
 *         PQC_RESOURCE_EXHAUSTED  more segments or codebooks than the capacities allow (the message
 *                                 names the field): open the GPU again with larger ones
 *         PQC_ABORTED             another step on this pqc_gpu is in progress: end it first */
PQC_API pqc_status pqc_gpu_step_begin(pqc_gpu* gpu, const pqc_step_item* items, uint32_t item_count,
                                      const pqc_step_options* options, void* stream,
                                      pqc_step** step);

typedef struct pqc_gpu_positions {
  size_t struct_size;
  /* Device memory, [items, kv_heads, stride]: ascending; elements from the count on are not
   * written. With PQC_STEP_SELECT_PER_TOKEN [query tokens of all items, kv_heads, stride]. */
  uint32_t* positions;
  /* Elements per kv head: at least selected_capacity, whatever the step's k, because a captured
   * graph is replayed in other steps. */
  uint64_t stride;
  /* Device memory, [items, kv_heads]; with PQC_STEP_SELECT_PER_TOKEN [query tokens of all items,
   * kv_heads]. */
  uint32_t* counts;
} pqc_gpu_positions;
/* Selects the k best tokens of each item in one layer, on the device: pqc_step_topk in a step of
 * pqc_gpu_step_begin. queries: [query tokens of all items, query_heads, key_dim], on the device.
 * Returns when the work is launched.
 *
 * Errors: PQC_INVALID_ARGUMENT     layer, queries; a pointer that is not the device's
 *         PQC_FAILED_PRECONDITION  a step on the CPU: pqc_step_topk
 *         PQC_UNIMPLEMENTED        a layer that is not of kind PQC_LAYERS_SELECTED
 *         PQC_OUT_OF_RANGE         out->stride is less than selected_capacity */
PQC_API pqc_status pqc_gpu_step_topk(pqc_step* step, uint32_t layer, const pqc_tensor* queries,
                                     const pqc_gpu_positions* out);

/* Merges b into a on the device: pqc_merge_tensors where all tensors, also a->sink_logits, have
 * device PQC_CUDA, pointers that are aligned to their elements, and the field `stream` NULL or
 * `stream`. `stream` is a cudaStream_t of the device; the call returns when the work is launched,
 * and the tensors must stay until the stream has finished it. pqc_step_attend writes contiguous
 * floats with natural logarithms, which are partial b of an engine's own attention:
 *
 *     pqc_partial own = PQC_INIT(pqc_partial);       // over sink and window, in the engine's dtype
 *     pqc_partial selected = PQC_INIT(pqc_partial);  // output and lse of pqc_step_attend
 *     ...
 *     status = pqc_gpu_merge_tensors(gpu, &own, &selected, stream);
 *
 * May be captured in a CUDA graph, and called in a step or outside of steps, on any thread.
 *
 * Errors: those of pqc_merge_tensors, and
 *         PQC_INVALID_ARGUMENT  a tensor of host memory, or of another device; a pointer that is
 *                               not aligned; a stream of another device */
PQC_API pqc_status pqc_gpu_merge_tensors(pqc_gpu* gpu, const pqc_partial* a, const pqc_partial* b,
                                         void* stream);

#ifdef __cplusplus
}
#endif

#endif /* PQCACHED_GPU_H_ */

/* pqcached client: steps on a GPU. Conventions are client.h's.
 *
 * An engine on a GPU passes device pointers and a stream. Rows stay in the sidecar's memory, which is page-locked and
 * read by the GPU where it lies; codes of the index, and the rows asked for most (block cache), are kept on the GPU.
 *
 *   pqc_gpu_open                     once per cache and device: memory is set aside by capacities
 *   pqc_gpu_ingest                   prefill, per chunk and layer: K and V on the device; returns at once
 *   per step: pqc_gpu_step_begin     instead of pqc_step_begin: readiness, descriptors to the device
 *     per layer: pqc_step_attend     queries, output, lse on the device; returns at once
 *            or pqc_gpu_step_select  positions and counts on the device, for engines with their own kernels
 *     pqc_step_end                   waits for the stream's work of the step, then as ever
 *   pqc_gpu_close
 *
 * What a step launches is the same for every step of one query length, whatever sequences it has: an engine may
 * capture the calls between begin and end in a CUDA graph and replay it in later steps in place of the calls, as
 * long as its own tensors stay where they are, with room for the items of those steps, and `generation` of pqc_gpu_counts
 * stays what it was. Begin and end are called outside of the capture, in every step. A layer is not captured in a step that
 * has launched it before: warm up in another step. With codes_bytes, none of that step's layers is launched before; a graph
 * copies the codes that its layers read, one layer ahead from its second layer on, and once something was captured, layers
 * that are launched wait for their own copies.
 *
 * CUDA comes with libpqcached_gpu.so, which is loaded by pqc_gpu_open: this library needs none. Where there is no
 * device, an engine uses the same calls with host memory (pqc_step_begin).
 */
#ifndef PQCACHED_GPU_H_
#define PQCACHED_GPU_H_

#include "pqcached/client.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct pqc_gpu pqc_gpu;

typedef enum pqc_gpu_policy {
  PQC_GPU_FREQUENCY =
      0, /* as LFU, over all blocks, and a new one has to be asked for 1.25 times as often */
  PQC_GPU_LRU = 1, /* the block asked for longest ago gives way */
  PQC_GPU_LFU = 2  /* the one asked for least gives way; frequencies age */
} pqc_gpu_policy;

typedef struct pqc_gpu_options {
  size_t struct_size;
  int32_t device;             /* as CUDA numbers them */
  uint32_t sequence_capacity; /* of a step; 0 = 8 */
  uint64_t token_capacity;    /* of the longest sequence; at most 2^30 */
  uint64_t selected_capacity; /* largest k; 0 = 4096, or token_capacity if that is less */
  uint32_t query_length;      /* longest; 0 = 1 */
  uint32_t segment_capacity;  /* of a sequence; 0 = token_capacity / 1024 + 64 */
  uint32_t codebook_capacity; /* of a sequence; 0 = token_capacity / 32768 + 2 */
  uint32_t no_block_cache;    /* 1: none; cache_tokens is 0 then */
  uint32_t
      cache_tokens; /* of the block cache, per kv head of a sequence; a multiple of 128; 0 = 4096 */
  uint32_t
      cache_loads; /* blocks of 128 rows loaded behind a step, per kv head of a sequence; 0 = 32 */
  pqc_gpu_policy policy;
  pqc_index index; /* what steps select by: pq; PQC_INDEX_DEFAULT = the cache's */
  const char*
      gpu_library_path; /* NULL = libpqcached_gpu.so beside this library, then the loader's search path */
  /* Device memory for the codes of the index: 0 = those of all layers, else at least two layers'. The first layers stay
   * on the device as far as it goes. The others' are kept page-locked on the host too, and copied one layer ahead in every
   * step, so layers should be called in ascending order. */
  uint64_t codes_bytes;
} pqc_gpu_options;

/* Sets memory on the device aside. The handle keeps the cache's, and is closed before its client is.
 * Errors: PQC_FAILED_PRECONDITION (libpqcached_gpu.so cannot be loaded or is of another version; no device, no driver,
 *         or one older than the runtime: compute on the CPU), PQC_UNIMPLEMENTED (device of an older architecture; the
 *         remote path; index flat; softcap; layers of different shapes), PQC_INVALID_ARGUMENT (the field and its
 *         limit; no such device), PQC_RESOURCE_EXHAUSTED (device or page-locked memory: how much was wanted) */
PQC_API pqc_status pqc_gpu_open(pqc_cache* cache, const pqc_gpu_options* options, pqc_gpu** gpu);
PQC_API void pqc_gpu_close(
    pqc_gpu* gpu); /* waits for the device; no step may be under way. NULL is fine */

typedef struct pqc_gpu_counts {
  size_t struct_size;
  uint64_t hits;   /* rows found in the block cache */
  uint64_t misses; /* rows read from the sidecar's memory */
  uint64_t loaded; /* blocks of 128 rows copied into the block cache */
  uint64_t evicted;
  uint64_t device_bytes; /* set aside on the device */
  uint64_t locked_bytes; /* of the sidecar's memory, page-locked so far */
  uint64_t generation;   /* grows when what was captured in a graph has to be captured anew */
  uint32_t
      staged; /* 1: some rows cannot be page-locked; the host brings them in the middle of steps */
  uint32_t resident_layers; /* whose codes stay on the device; codes of the others are copied */
} pqc_gpu_counts;
/* As of the last step that ended, whose work it waits for: for status pages. May be called beside steps and captures, on
 * any thread. */
PQC_API pqc_status pqc_gpu_count(pqc_gpu* gpu, pqc_gpu_counts* counts);

/* Prefill: pqc_ingest for K and V on the device (PQC_CUDA; [tokens, kv_heads, dim] or paged, dims contiguous, the block
 * table's `blocks` on the host). `stream` packs them into page-locked staging, in the cache's dtype where that has no more
 * bytes; K and V may be overwritten by whatever the stream is given behind. The call returns when that is launched. Once the
 * stream has come so far, a thread of the client's hands the rows to the sidecar, while the stream computes the next layer or
 * chunk. When all slots of staging are on their way (pqc_client_options), the call waits for one.
 *
 * What fails later (the sidecar refuses rows) is told by the next pqc_gpu_ingest for the sequence, and by whatever waits for
 * its rows: pqc_sequence_flush, pqc_build_index, steps. The sequence's rows behind the failed ones are not stored, until
 * pqc_sequence_flush or a call that changes the sequence has told of it: ingest from the failed ones on then, all of which
 * is acknowledged that is there already.
 *
 * The first call page-locks the staging ring. Calls may run beside steps, and on several threads for several sequences;
 * not in a capture.
 * Errors: pqc_ingest's; PQC_INVALID_ARGUMENT also: a pointer that is not the device's, a stream of another device or one that
 *         captures; PQC_UNIMPLEMENTED: dims that are not contiguous; PQC_RESOURCE_EXHAUSTED: the ring cannot be
 *         page-locked: copy to the host, and pqc_ingest; PQC_DEADLINE_EXCEEDED: no slot in time */
PQC_API pqc_status pqc_gpu_ingest(pqc_gpu* gpu, pqc_sequence* sequence, uint32_t layer,
                                  uint64_t first_position, const pqc_tensor* keys,
                                  const pqc_tensor* values, void* stream);

/* pqc_step_begin for steps whose tensors are on the device. options->selection is that of all layers and calls; all
 * items have the same query_length. `stream` is a cudaStream_t of the device; all work of the step is ordered by it.
 * One step at a time on a pqc_gpu; steps of others, and on the CPU, may run beside.
 *
 * In the step: pqc_step_attend takes queries with device PQC_CUDA (their `stream` NULL or the step's) and device
 * pointers output and lse, and returns when the work is launched; counts are on the host, at once. pqc_step_end takes
 * keys and values of host memory or, with device PQC_CUDA, of the device; it waits for what the stream was given in
 * the step, so call it where the engine waits for the step's tokens anyway. Results count only when it is PQC_OK.
 *
 * Errors: pqc_step_begin's; PQC_INVALID_ARGUMENT also: no selection, a stream of another device or one that
 *         captures, more than the capacities; PQC_RESOURCE_EXHAUSTED: more segments or codebooks than there is room
 *         for (the message names the field); PQC_ABORTED: another step is under way */
PQC_API pqc_status pqc_gpu_step_begin(pqc_gpu* gpu, const pqc_step_item* items, uint32_t item_count,
                                      const pqc_step_options* options, void* stream,
                                      pqc_step** step);

typedef struct pqc_gpu_positions {
  size_t struct_size;
  uint32_t*
      positions; /* device, [items, kv_heads, stride]: ascending; behind the count nothing is written */
  uint64_t
      stride; /* at least selected_capacity, whatever the step's k: graphs serve other steps too */
  uint32_t* counts; /* device, [items, kv_heads] */
} pqc_gpu_positions;
PQC_API pqc_status pqc_gpu_step_select(pqc_step* step, uint32_t layer, const pqc_tensor* queries,
                                       const pqc_gpu_positions* out);

#ifdef __cplusplus
}
#endif

#endif /* PQCACHED_GPU_H_ */

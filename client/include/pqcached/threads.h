/* pqcached client: the threads on which kernels run in the engine's process. Included by client.h.
 *
 * On the local path a call computes on the calling thread and on further ones, which are either a
 * pool of the client's own or the engine's, through a function of this type. Which one is chosen
 * when the client is opened (pqc_client_options); pqc_client_set_threads changes how many.
 *
 * Example, for a pool that runs a function on each of its threads:
 *
 *     typedef struct pool_job {
 *       void (*body)(void* context, uint32_t index);
 *       void* context;
 *       uint32_t count;
 *     } pool_job;
 *
 *     static void run_on_thread(void* argument, uint32_t thread, uint32_t thread_count) {
 *       const pool_job* job = (const pool_job*)argument;
 *       for (uint32_t i = thread; i < job->count; i += thread_count) job->body(job->context, i);
 *     }
 *
 *     static void run_in_pool(void* pool, uint32_t count,
 *                             void (*body)(void* context, uint32_t index), void* context) {
 *       pool_job job = {body, context, count};
 *       engine_pool_run((engine_pool*)pool, run_on_thread, &job);  // waits for all
 *     }
 *
 *     static void use_pool(engine_pool* pool, pqc_client_options* options) {
 *       options->parallel_for = run_in_pool;
 *       options->parallel_for_context = pool;
 *       options->thread_count = engine_pool_threads(pool);
 *     }
 */
#ifndef PQCACHED_THREADS_H_
#define PQCACHED_THREADS_H_

#include "pqcached/status.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Thread pool of the engine: runs body(context, i) for each i in [0, count), in any order, on any
 * threads, and returns when all are done. It may run everything on the calling thread, and must not
 * throw. It is called from every thread that calls the library, also concurrently, with a `count`
 * of at most thread_count, and only for work that is worth several threads. A body works until no
 * work of the layer is left, so a thread that begins late finds nothing to do. */
typedef void (*pqc_parallel_for)(void* hook_context, uint32_t count,
                                 void (*body)(void* context, uint32_t index), void* context);

/* Thread count with which kernels run on the calling thread only. For engines whose own workers
 * spin while a layer is computed: further threads would compete with them for the cores. */
#define PQC_THREADS_CALLER 1u

#ifdef __cplusplus
}
#endif

#endif /* PQCACHED_THREADS_H_ */

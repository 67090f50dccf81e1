/* The example of threads.h, compiled as C99. It is not run, because it needs an engine. */
#include "pqcached/client.h"

/* A thread pool as engines have them. */
typedef struct engine_pool engine_pool;
void engine_pool_run(engine_pool* pool,
                     void (*function)(void* argument, uint32_t thread, uint32_t thread_count),
                     void* argument);
uint32_t engine_pool_threads(const engine_pool* pool);
void threads_h_example(engine_pool* pool, pqc_client_options* options);

// clang-format off
// [example]
typedef struct pool_job {
  void (*body)(void* context, uint32_t index);
  void* context;
  uint32_t count;
} pool_job;

static void run_on_thread(void* argument, uint32_t thread, uint32_t thread_count) {
  const pool_job* job = (const pool_job*)argument;
  for (uint32_t i = thread; i < job->count; i += thread_count) job->body(job->context, i);
}

static void run_in_pool(void* pool, uint32_t count,
                        void (*body)(void* context, uint32_t index), void* context) {
  pool_job job = {body, context, count};
  engine_pool_run((engine_pool*)pool, run_on_thread, &job);  // waits for all
}

static void use_pool(engine_pool* pool, pqc_client_options* options) {
  options->parallel_for = run_in_pool;
  options->parallel_for_context = pool;
  options->thread_count = engine_pool_threads(pool);
}
// [/example]
// clang-format on

void threads_h_example(engine_pool* pool, pqc_client_options* options) { use_pool(pool, options); }

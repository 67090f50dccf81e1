/* The example of index.h, compiled as C99. */
#include "pqcached/client.h"

typedef struct engine_request {
  int is_cancelled;
} engine_request;

pqc_status index_h_example(pqc_sequence* sequence, engine_request* request);

// clang-format off
// [example]
static int goes_on(void* context, const pqc_build_progress* progress) {
  const engine_request* request = (const engine_request*)context;
  return !request->is_cancelled || progress->layers_done == progress->layer_count;
}

static pqc_status build(pqc_sequence* sequence, engine_request* request) {
  pqc_build_options options = PQC_INIT(pqc_build_options);
  options.sink_tokens = 16;
  options.callback = goes_on;
  options.callback_context = request;
  return pqc_build_index(sequence, &options);
}
// [/example]
// clang-format on

pqc_status index_h_example(pqc_sequence* sequence, engine_request* request) {
  return build(sequence, request);
}

/* The example of decode.h, compiled as C99. It is not run, because it needs a sidecar. */
#include "pqcached/decode.h"

typedef void project_function(uint32_t layer, float* hidden, pqc_tensor* queries, pqc_tensor* keys,
                              pqc_tensor* values);
typedef void finish_function(uint32_t layer, const pqc_step_attention* attention, float* hidden);

/* The engine's own work before and after the attention of a layer. */
struct engine {
  project_function* project;
  finish_function* finish_layer;
};

pqc_status decode_h_example(pqc_client* client, const pqc_step_item* items, uint32_t item_count,
                            pqc_step_options options, uint32_t layer_count,
                            pqc_step_attention attention, float* hidden, struct engine engine);

// clang-format off
pqc_status decode_h_example(pqc_client* client, const pqc_step_item* items, uint32_t item_count,
                            pqc_step_options options, uint32_t layer_count,
                            pqc_step_attention attention, float* hidden, struct engine engine) {
  project_function* const project = engine.project;
  finish_function* const finish_layer = engine.finish_layer;
  pqc_tensor queries = PQC_INIT(pqc_tensor), keys = PQC_INIT(pqc_tensor);
  pqc_tensor values = PQC_INIT(pqc_tensor);
  // [example]
  pqc_step* step = NULL;
  pqc_status status = pqc_step_begin(client, items, item_count, &options, &step);
  if (status != PQC_OK) return status;
  for (uint32_t layer = 0; layer < layer_count; ++layer) {
    project(layer, hidden, &queries, &keys, &values);
    status = pqc_step_decode(step, layer, &queries, &keys, &values, NULL, &attention);
    if (status != PQC_OK) {
      pqc_step_abandon(step);
      return status;
    }
    finish_layer(layer, &attention, hidden);
  }
  return pqc_step_end(step, NULL, 0, NULL);
  // [/example]
}
// clang-format on

/* The example of step.h, compiled as C99. It is not run, because it needs a sidecar. */
#include "pqcached/client.h"

/* One layer, and one token: query, output: [32, 128]; lse: [32]; rows: that layer's K and V. */
pqc_status step_h_example(pqc_client* client, pqc_sequence* sequence, uint64_t position,
                          const pqc_tensor* query, const pqc_layer_rows* rows, float* output,
                          float* lse);

// clang-format off
pqc_status step_h_example(pqc_client* client, pqc_sequence* sequence, uint64_t position,
                          const pqc_tensor* query, const pqc_layer_rows* rows, float* output,
                          float* lse) {
  // [example]
  pqc_step_item item = PQC_INIT(pqc_step_item);
  item.sequence = sequence;
  item.query_position = position;
  pqc_selection selection = PQC_INIT(pqc_selection);
  selection.sink_tokens = 16;
  selection.window_tokens = 64;
  selection.ratio = 0.1;
  pqc_step_options options = PQC_INIT(pqc_step_options);
  options.selection = &selection;
  pqc_step* step = NULL;
  pqc_status status = pqc_step_begin(client, &item, 1, &options, &step);
  if (status != PQC_OK) return status;

  // Per layer, once its query is computed; the engine merges its sink and window.
  pqc_step_attention attention = PQC_INIT(pqc_step_attention);
  attention.output = output;  // [query_heads, value_dim]
  attention.output_capacity = 32 * 128;
  attention.lse = lse;  // [query_heads]
  attention.lse_capacity = 32;
  status = pqc_step_attend(step, 0, query, NULL, &attention);
  if (status != PQC_OK) {
    pqc_step_abandon(step);
    return status;
  }

  // The new token's rows in all stored layers; the step is closed in any case.
  return pqc_step_end(step, rows, 1, NULL);
  // [/example]
}

/* The example of load.h, compiled as C99. It is not run, because it needs a sidecar. */
#include "pqcached/load.h"

void compute_layer(uint32_t layer);
pqc_status load_h_example(pqc_sequence* sequence, uint64_t shared, const pqc_layer_rows* layers,
                          uint32_t layer_count, void* request);

// clang-format off
pqc_status load_h_example(pqc_sequence* sequence, uint64_t shared, const pqc_layer_rows* layers,
                          uint32_t layer_count, void* request) {
  // [example]
  pqc_token_range tokens = {0, shared};
  pqc_operation* load = NULL;
  pqc_status status = pqc_load_begin(sequence, tokens, layers, layer_count, request, &load);
  for (uint32_t i = 0; status == PQC_OK && i < layer_count; ++i) {
    status = pqc_load_wait(load, i + 1, 0);
    if (status == PQC_OK) compute_layer(i);
  }
  pqc_operation_close(load, 0);
  // [/example]
  return status;
}
// clang-format on

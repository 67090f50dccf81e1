/* The example of names.h, compiled as C99. */
#include "pqcached/client.h"

pqc_status names_h_example(pqc_sequence* sequence, uint64_t position, uint32_t token_id,
                           const pqc_layer_rows* layers, uint32_t layer_count);

// clang-format off
pqc_status names_h_example(pqc_sequence* sequence, uint64_t position, uint32_t token_id,
                           const pqc_layer_rows* layers, uint32_t layer_count) {
  pqc_status status = PQC_OK;
  // [example]
  pqc_row_options options = PQC_INIT(pqc_row_options);
  options.names_begin = position;
  options.token_ids = &token_id;
  options.token_id_count = 1;
  status = pqc_append_with(sequence, position, layers, layer_count, &options, NULL);
  // [/example]
  return status;
}
// clang-format on

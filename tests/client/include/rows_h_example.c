/* The example of rows.h, compiled as C99. */
#include "pqcached/client.h"

pqc_status rows_h_example(pqc_sequence* sequence, uint64_t chunk_begin,
                          const pqc_layer_rows* layers, uint32_t layer_count);

// clang-format off
pqc_status rows_h_example(pqc_sequence* sequence, uint64_t chunk_begin,
                          const pqc_layer_rows* layers, uint32_t layer_count) {
  pqc_status status = PQC_OK;
  // [example]
  status = pqc_enqueue_rows(sequence, chunk_begin, layers, layer_count, NULL);
  if (status != PQC_OK) return status;
  // ... the model computes the next chunk, or decodes ...
  return pqc_sequence_flush(sequence);  // waits, and returns the error of earlier rows
  // [/example]
}
// clang-format on

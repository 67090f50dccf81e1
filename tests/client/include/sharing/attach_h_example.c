/* The example of attach.h, compiled as C99. It is not run, because it needs a sidecar. */
#include "pqcached/attach.h"

pqc_status serve(pqc_sequence* sequence, uint64_t tokens);
pqc_status attach_h_example(pqc_cache* cache, uint64_t sequence_id);

// clang-format off
pqc_status attach_h_example(pqc_cache* cache, uint64_t sequence_id) {
  // [example]
  uint64_t tokens = 0;
  pqc_sequence* sequence = NULL;
  pqc_status status = pqc_sequence_attach(cache, sequence_id, &sequence, &tokens);
  if (status == PQC_OK) status = serve(sequence, tokens);
  if (sequence) pqc_sequence_detach(sequence);
  // [/example]
  return status;
}
// clang-format on

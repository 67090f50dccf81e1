/* The example of progress.h, compiled as C99. It is not run, because it needs a sidecar. */
#include "pqcached/client.h"

pqc_status reopen_client(void);
pqc_status decode_others(void);
pqc_status attend_exactly(void);
pqc_status progress_h_example(pqc_sequence* sequence);

// clang-format off
pqc_status progress_h_example(pqc_sequence* sequence) {
  // [example]
  pqc_progress progress = PQC_INIT(pqc_progress);
  pqc_status status = pqc_sequence_progress(sequence, &progress);
  if (status != PQC_OK) return status;
  if (progress.is_lost) return reopen_client();
  if (progress.is_restarting) return decode_others();
  if (progress.layers_ready < progress.layer_count) return attend_exactly();
  // [/example]
  return PQC_OK;
}
// clang-format on

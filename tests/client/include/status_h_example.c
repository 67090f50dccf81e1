/* The example of status.h, compiled as C99. It is not run, because it needs a sidecar. */
#include <stdio.h>

#include "pqcached/client.h"

int status_h_example(pqc_sequence* sequence, const pqc_tensor* keys, const pqc_tensor* values,
                     void (*wait_ms)(uint32_t));

// clang-format off
int status_h_example(pqc_sequence* sequence, const pqc_tensor* keys, const pqc_tensor* values,
                     void (*wait_ms)(uint32_t)) {
  // [example]
  while (pqc_ingest(sequence, 0, 0, keys, values) != PQC_OK) {
    const uint32_t retry_ms = pqc_last_error_retry_ms();
    if (retry_ms == 0) {
      fprintf(stderr, "%s (field: %s)\n", pqc_last_error(), pqc_last_error_field());
      return 1;
    }
    wait_ms(retry_ms);
  }
  // [/example]
  return 0;
}
// clang-format on

// Passes rows of a prefill to the sender (pqc_enqueue_rows).
#ifndef PQCACHED_CLIENT_STEP_ENQUEUE_H_
#define PQCACHED_CLIENT_STEP_ENQUEUE_H_

#include <cstdint>

#include "client/step/handles.h"
#include "pqcached/client.h"

namespace pqcached::client {

// Implements pqc_enqueue_rows.
pqc_status EnqueueRows(pqc_sequence* sequence, uint64_t first_position,
                       const pqc_layer_rows* layers, uint32_t layer_count,
                       const pqc_row_options* caller_options);

}  // namespace pqcached::client

#endif  // PQCACHED_CLIENT_STEP_ENQUEUE_H_

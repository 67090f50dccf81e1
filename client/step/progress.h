// What a client knows of a sequence without an RPC.
#ifndef PQCACHED_CLIENT_STEP_PROGRESS_H_
#define PQCACHED_CLIENT_STEP_PROGRESS_H_

#include <memory>

#include "client/step/handles.h"
#include "pqcached/client.h"

namespace pqcached::client {

// Implements pqc_sequence_progress. REQUIRES: the counts of *progress are 0.
pqc_status ReadProgress(const std::shared_ptr<SequenceState>& state, pqc_progress* progress);

}  // namespace pqcached::client

#endif  // PQCACHED_CLIENT_STEP_PROGRESS_H_

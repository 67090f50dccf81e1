// Handles of sequences: how they begin and end.
#ifndef PQCACHED_CLIENT_ABI_SEQUENCE_HANDLES_H_
#define PQCACHED_CLIENT_ABI_SEQUENCE_HANDLES_H_

#include <cstdint>
#include <memory>

#include "client/step/handles.h"
#include "pqcached/client.h"

namespace pqcached::client {

// Creates a handle for a sequence that the sidecar has created or is about to create.
std::unique_ptr<pqc_sequence> NewHandle(const std::shared_ptr<const CacheState>& cache);

// Sets what the sidecar has answered for a new sequence.
void Adopt(uint64_t sequence_id, uint64_t token_count, pqc_sequence& handle);

// Frees the handle of a sequence that the sidecar has dropped, and releases its lease in the
// background.
void Forget(std::unique_ptr<pqc_sequence> sequence);

}  // namespace pqcached::client

#endif  // PQCACHED_CLIENT_ABI_SEQUENCE_HANDLES_H_

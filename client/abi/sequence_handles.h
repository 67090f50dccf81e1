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

// Frees a handle, and releases its lease in the background. The sequence in the sidecar is not
// changed. The client may be closed.
void Forget(std::unique_ptr<pqc_sequence> sequence);

}  // namespace pqcached::client

#endif  // PQCACHED_CLIENT_ABI_SEQUENCE_HANDLES_H_

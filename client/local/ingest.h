// Prefill rows by way of the staging ring: the caller's thread packs part after part into slots while the
// sidecar copies what came before.
#ifndef PQCACHED_CLIENT_LOCAL_INGEST_H_
#define PQCACHED_CLIENT_LOCAL_INGEST_H_

#include <cstdint>

#include "client/local/staging.h"
#include "client/remote.h"
#include "pqcached/client.h"

namespace pqcached::client {

// One slot, packed: keys from its begin on, values behind them.
struct FilledSlot {
  Staging::Slot slot;
  uint64_t first_position = 0;
  uint64_t token_count = 0;
  uint64_t key_bytes = 0;
  uint64_t value_bytes = 0;

  static uint64_t AlignUp(uint64_t bytes) { return (bytes + 127) / 128 * 128; }
  uint64_t values_begin() const { return AlignUp(key_bytes); }
};

// Hands the slot's rows to the sidecar. `rows`: layer, dtypes, heads and dims of what is packed; neither its bytes nor its token
// count is read. The slot is not used again when the sidecar may still read it.
pqc_status CommitSlot(Remote& remote, uint64_t sequence_id, const RowBlock& rows,
                      FilledSlot& filled, RefusalBuffer* error);

struct LocalIngest {
  Staging& staging;
  Remote& remote;
  uint64_t sequence_id = 0;
  uint32_t timeout_ms = 0;        // of the whole
  uint64_t max_tensor_bytes = 0;  // of one reference; 0 = no limit
};

// All or nothing; but where the sidecar does not tell when it is done with a slot, what fits into a slot is:
// then those before a failure are stored and acknowledged when the call is repeated. Sets *remote_instead
// when there is no staging ring to be had, or a token does not fit into a slot: nothing is stored then.
pqc_status IngestLocally(const LocalIngest& ingest, uint64_t first_position, const RowBlock& rows,
                         bool* remote_instead);

}  // namespace pqcached::client

#endif  // PQCACHED_CLIENT_LOCAL_INGEST_H_

// Prefill of rows through the staging ring: the caller's thread packs part after part into slots
// while the sidecar copies the earlier parts.
#ifndef PQCACHED_CLIENT_LOCAL_INGEST_H_
#define PQCACHED_CLIENT_LOCAL_INGEST_H_

#include <cstdint>

#include "client/base/remote.h"
#include "client/local/staging.h"
#include "pqcached/client.h"

namespace pqcached::client {

// A packed slot: keys at its beginning, values after them.
struct FilledSlot {
  Staging::Slot slot;
  uint64_t first_position = 0;
  uint64_t token_count = 0;
  uint64_t key_bytes = 0;
  uint64_t value_bytes = 0;

  static uint64_t AlignUp(uint64_t bytes) { return (bytes + 127) / 128 * 128; }
  uint64_t values_begin() const { return AlignUp(key_bytes); }
};

// Commits the slot's rows to the sidecar. `rows` gives layer, dtypes, heads, dims and names of the
// packed rows; neither its bytes nor its token count is read. The slot is abandoned when the
// sidecar may still read it.
pqc_status CommitSlot(Remote& remote, uint64_t sequence_id, const RowBlock& rows,
                      FilledSlot& filled, RefusalBuffer* error);

// Sends the sidecar new calls with the abandoned slots, so that it will not accept the earlier
// calls with them and the slots become free.
void InvalidateAbandoned(Staging& staging, Remote& remote);

struct LocalIngest {
  Staging& staging;
  Remote& remote;
  uint64_t sequence_id = 0;
  uint32_t timeout_ms = 0;        // timeout of the whole call
  uint64_t max_tensor_bytes = 0;  // limit of one staging reference; 0 = no limit
};

// Writes all rows or none, except when the sidecar reports no slot generations: then each slot is
// committed separately, the slots before a failure stay stored, and a repeat of the call
// acknowledges them. Sets *remote_instead, and stores nothing, when there is no staging ring or a
// token does not fit into a slot.
pqc_status IngestLocally(const LocalIngest& ingest, uint64_t first_position, const RowBlock& rows,
                         bool* remote_instead);

}  // namespace pqcached::client

#endif  // PQCACHED_CLIENT_LOCAL_INGEST_H_

// Preparer does the RPCs that a call on a sequence needs and may not wait for, on its own thread:
// the call returns a retry time, and a later one finds the work done.
//
// Thread-safe.
#ifndef PQCACHED_CLIENT_STEP_PREPARER_H_
#define PQCACHED_CLIENT_STEP_PREPARER_H_

#include <memory>
#include <optional>

#include "client/step/handles.h"
#include "kernels/base/worker.h"
#include "kvstore/read/layout.h"
#include "pqcached/client.h"

namespace pqcached::client {

class Preparer {
 public:
  // What a call lacks, apart from the lease, which every preparation on the local path acquires
  // where there is none.
  struct Wanted {
    bool close_prefill = false;                          // of a live index
    bool newer_image = false;                            // when the sidecar has a newer one
    std::optional<kvstore::IndexDescriptor> index = {};  // in the image
    bool token_count = false;                            // of the sequence; remote path
    bool operator==(const Wanted&) const = default;
  };

  // REQUIRES: `client` outlives the object.
  explicit Preparer(ClientState& client) : client_(client) {}

  // Starts a preparation, unless one of the sequence is in progress, and fails:
  // PQC_DEADLINE_EXCEEDED with a retry time, or the error of the last preparation, once.
  pqc_status Request(const std::shared_ptr<SequenceState>& sequence, const Wanted& wanted);
  // Releases the lease of a sequence that is being dropped.
  void Release(std::shared_ptr<SequenceState> sequence);

 private:
  pqc_status Prepare(SequenceState& sequence, const Wanted& wanted);
  pqc_status PrepareMapped(SequenceState& sequence, const Wanted& wanted);
  pqc_status ClosePrefill(SequenceState& sequence);
  pqc_status Describe(SequenceState& sequence);
  void Run(SequenceState& sequence, const Wanted& wanted);

  ClientState& client_;
  base::Worker worker_{"pqc-prepare"};
};

}  // namespace pqcached::client

#endif  // PQCACHED_CLIENT_STEP_PREPARER_H_

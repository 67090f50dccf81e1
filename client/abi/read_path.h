// Reads a sequence's rows in mapped memory.
#ifndef PQCACHED_CLIENT_ABI_READ_PATH_H_
#define PQCACHED_CLIENT_ABI_READ_PATH_H_

#include "client/local/read.h"
#include "client/step/handles.h"
#include "kernels/base/status_macros.h"

namespace pqcached::client {

// Runs read(pinned) until the data that it read is known to be valid, and returns its status. If
// the client's newest image lacks rows or an index, a newer image is fetched once before the call
// fails. Sets *remote_instead when no lease can be acquired.
//
// REQUIRES: sequence.local.
template <class Read>
pqc_status ReadMapped(SequenceState& sequence, const Read& read, bool* remote_instead) {
  constexpr int kMaxAttempts = 4;
  bool refreshed = false;
  for (int attempt = 1;; ++attempt) {
    Pinned pinned;
    if (const pqc_status status = PinNewest(*sequence.local, &pinned); status != PQC_OK) {
      *remote_instead = status == PQC_RESOURCE_EXHAUSTED || status == PQC_UNIMPLEMENTED;
      return status;
    }
    const pqc_status status = read(pinned);
    const bool lacking = status == PQC_OUT_OF_RANGE || status == PQC_FAILED_PRECONDITION;
    if (lacking && !refreshed) {
      refreshed = true;
      RETURN_IF_ERROR(sequence.local->Refresh(&pinned.image));
      continue;
    }
    if (status != PQC_OK && status != PQC_ABORTED) return status;
    const pqc_status check_status = sequence.local->Check(pinned.lease_epoch);
    if (check_status == PQC_OK && status == PQC_OK) return PQC_OK;
    if (check_status != PQC_OK && check_status != PQC_ABORTED) return check_status;
    if (attempt >= kMaxAttempts) return PQC_ABORTED;
  }
}

}  // namespace pqcached::client

#endif  // PQCACHED_CLIENT_ABI_READ_PATH_H_
